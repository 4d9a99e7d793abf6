#!/usr/bin/env python3
"""pip makes a wheel of the source tree without a network, and what it installs is the module.

    wheel_check.py SOURCE_DIR BUILD_DIR      takes the module that BUILD_DIR holds, so that nothing is compiled twice
"""
import pathlib
import re
import subprocess
import sys
import tempfile

SOURCE, BUILD = (pathlib.Path(p).resolve() for p in sys.argv[1:])
USE = """
import livequant, sys
assert livequant.__file__.startswith(sys.argv[1]), livequant.__file__
schema = livequant.Schema("kivi2", layers=1, kv_heads=1, head_dim=64)
cache = livequant.Cache(schema, max_len=64, max_q_heads=1)
sequence = cache.open()
row = memoryview(bytearray(256)).cast("f", (1, 64))
with cache.begin(sequence, 1) as step:
    step.prepare(0, row, row)
    assert memoryview(step.attend(0, row, 1.0)).tolist() == [[[0.0] * 64]]
    step.publish()
assert len(sequence) == 1
print(livequant.__version__)
"""


def run(*args):
    done = subprocess.run([str(a) for a in args], capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{args}: exit {done.returncode}\n{done.stdout}{done.stderr}")
    return done.stdout


with tempfile.TemporaryDirectory() as tmp:
    pip = [sys.executable, "-m", "pip", "--no-input", "--disable-pip-version-check"]
    run(*pip, "wheel", "--no-index", "--no-deps", "--wheel-dir", tmp, "--config-settings", f"build-dir={BUILD}", SOURCE)
    wheel, = pathlib.Path(tmp).glob("*.whl")
    run(*pip, "install", "--no-index", "--no-deps", "--target", f"{tmp}/site", wheel)
    # -I: nothing of this user's or this folder's; the module stands on the standard library alone.
    version = run(sys.executable, "-I", "-S", "-c", f"import sys; sys.path.insert(0, {tmp + '/site'!r})\n{USE}", f"{tmp}/site").strip()
    declared = re.search(r'^version = "(.*?)"', (SOURCE / "pyproject.toml").read_text(), re.M).group(1)
    cmake = re.search(r"project\(livequant VERSION (\S+)", (SOURCE / "CMakeLists.txt").read_text()).group(1)
    if not version == declared == cmake:
        sys.exit(f"the module says {version}, pyproject.toml {declared}, CMakeLists.txt {cmake}")
    sys.path.insert(0, str(SOURCE / "python"))
    import build_backend
    name = build_backend.build_sdist(tmp)
    members = run("tar", "tzf", f"{tmp}/{name}").split()
    for needed in ("CMakeLists.txt", "src/api/api.cc", "python/build_backend.py", "PKG-INFO", "LICENSE"):
        if f"livequant-{declared}/{needed}" not in members:
            sys.exit(f"the source distribution lacks {needed}")
    print(f"{wheel.name}, {len(members)} files in {name}")
