"""What pip calls (PEP 517): a wheel with the one extension module, which CMake builds. Standard library only, so that it works
without a network and without setuptools.

    pip install .
    pip wheel . --config-settings build-dir=build/dev      # an existing CMake build tree instead of a fresh one
"""
import base64
import hashlib
import io
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import zipfile

ROOT = pathlib.Path(__file__).resolve().parent.parent
SOURCES = ["CMakeLists.txt", "LICENSE", "README.md", "pyproject.toml", "apps", "cmake", "include", "python", "src"]


def _project():
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _metadata(p):
    return (f"Metadata-Version: 2.1\nName: {p['name']}\nVersion: {p['version']}\nSummary: {p['description']}\n"
            f"License: {p['license']['text']}\nRequires-Python: {p['requires-python']}\n")


def _build(settings):
    """Path of the built module. A build tree stays in build/, so that the next build is short."""
    unknown = set(settings) - {"build-dir"}
    if unknown:
        raise SystemExit(f"config setting {sorted(unknown)[0]} is unknown; build-dir is known")
    build = pathlib.Path(settings.get("build-dir", f"build/pip-{sysconfig.get_config_var('SOABI')}"))
    build = build if build.is_absolute() else ROOT / build
    if "build-dir" not in settings:
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        subprocess.run(["cmake", "-S", ROOT, "-B", build, *generator, "-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O2",
                        "-DLIVEQUANT_TESTS=OFF", "-DLIVEQUANT_PYTHON_REQUIRED=ON", f"-DPython_EXECUTABLE={sys.executable}"], check=True)
    subprocess.run(["cmake", "--build", build, "--target", "livequant_python", "--parallel"], check=True)
    module = build / "python" / ("livequant" + sysconfig.get_config_var("EXT_SUFFIX"))
    if not module.exists():
        raise SystemExit(f"{build} was built for another Python: there is no {module.name}")
    return module


def build_wheel(wheel_directory, config_settings=None, metadata_directory=None):
    p = _project()
    module = _build(config_settings or {})
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    tag = f"{python}-{python}-{re.sub('[-.]', '_', sysconfig.get_platform())}"
    info = f"{p['name']}-{p['version']}.dist-info"
    files = {module.name: module.read_bytes(), f"{info}/METADATA": _metadata(p).encode(), f"{info}/LICENSE": (ROOT / "LICENSE").read_bytes(),
             f"{info}/WHEEL": f"Wheel-Version: 1.0\nGenerator: livequant\nRoot-Is-Purelib: false\nTag: {tag}\n".encode()}
    record = ""
    for path, data in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(data)}\n"
    files[f"{info}/RECORD"] = (record + f"{info}/RECORD,,\n").encode()
    name = f"{p['name']}-{p['version']}-{tag}.whl"
    with zipfile.ZipFile(pathlib.Path(wheel_directory) / name, "w", zipfile.ZIP_DEFLATED) as wheel:
        for path, data in files.items():
            entry = zipfile.ZipInfo(path)
            entry.compress_type = zipfile.ZIP_DEFLATED
            entry.external_attr = (0o755 if path == module.name else 0o644) << 16
            wheel.writestr(entry, data)
    return name


def build_sdist(sdist_directory, config_settings=None):
    p = _project()
    base = f"{p['name']}-{p['version']}"
    with tarfile.open(pathlib.Path(sdist_directory) / f"{base}.tar.gz", "w:gz") as out:
        for source in SOURCES:
            out.add(ROOT / source, f"{base}/{source}", filter=lambda t: None if "__pycache__" in t.name else t)
        data = _metadata(p).encode()
        entry = tarfile.TarInfo(f"{base}/PKG-INFO")
        entry.size = len(data)
        out.addfile(entry, io.BytesIO(data))
    return f"{base}.tar.gz"
