"""What `livequant run --record` wrote, done again through the module: every attention output, array and cache byte, bit for bit.

The binary is in LIVEQUANT_BINARY, the source tree in LIVEQUANT_SOURCE.
"""
import json
import os
import pathlib
import subprocess
import sys

import pytest

BINARY, SOURCE = os.environ["LIVEQUANT_BINARY"], pathlib.Path(os.environ["LIVEQUANT_SOURCE"])
MODEL = SOURCE / "models/books-7m"
PROMPT = (SOURCE / "tests/api/prompt.txt").read_text().strip()
sys.path.insert(0, str(SOURCE / "examples"))
import embed_numpy  # noqa: E402


def record(path, *flags, prompt=PROMPT):
    done = subprocess.run([BINARY, "run", "-p", prompt, "-n", "41", "--ignore-eos", "--prefill-chunk", "150", "--record", path, *map(str, flags)],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return path


@pytest.mark.parametrize("form", ["f32", "bf16", "fp8_e4m3", "int8", "int4", "kivi4", "kivi2", "kivi2_sync", "qserve4", "pre_rope.json"])
def test_a_run_is_repeated(form, tmp_path, capsys):
    spec = SOURCE / "tests/api" / form if form.endswith(".json") else form
    assert embed_numpy.main(record(tmp_path / "r.safetensors", "--kv-cache-dtype", spec)) == 0
    assert " 0 of " in capsys.readouterr().out


def other_model(folder, **config):
    """The embedded model's weights under another config."""
    for file in MODEL.iterdir():
        (folder / file.name).symlink_to(file)
    (folder / "config.json").unlink()
    old = {k: v for k, v in json.loads((MODEL / "config.json").read_text()).items() if k not in ("rope_scaling", "rope_parameters")}
    (folder / "config.json").write_text(json.dumps({**old, **config}))
    return folder


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}


@pytest.mark.parametrize("config", [{"rope_scaling": LLAMA3}, {"rope_scaling": YARN}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
                                    {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 160}], ids=["llama3", "yarn", "linear", "window"])
@pytest.mark.parametrize("form", ["pre_rope.json", "kivi2"])
def test_of_other_models(config, form, tmp_path):
    """Keys before RoPE and pinned ones are rotated by the cache: the module must have been told the model's RoPE."""
    spec = SOURCE / "tests/api" / form if form.endswith(".json") else form
    (tmp_path / "model").mkdir()
    assert embed_numpy.main(record(tmp_path / "r.safetensors", "-m", other_model(tmp_path / "model", **config), "--kv-cache-dtype", spec)) == 0


def test_contracts_keep_their_steps(tmp_path):
    for contract in ("chunk:64", "prompt"):
        assert embed_numpy.main(record(tmp_path / "r.safetensors", "--kv-cache-dtype", "kivi2", "--contract", contract)) == 0


def test_a_bit_that_differs_is_found(tmp_path, capsys):
    path = record(tmp_path / "r.safetensors", "--kv-cache-dtype", "kivi2")
    raw = path.read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8:begin])
    for tensor, says in [("attention.3", ": 1 of "), ("v.5.codes", "63 of 64"), ("state", "DIFFERENT")]:
        at = begin + header[tensor]["data_offsets"][0]
        path.write_bytes(raw[:at] + bytes([raw[at] ^ 1]) + raw[at + 1:])
        assert embed_numpy.main(path) == 1
        assert says in capsys.readouterr().out
