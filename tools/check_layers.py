#!/usr/bin/env python3
"""Compares the include graph that is really there with the one that each folder declares.

A folder's declared includes are the DEPS of its lq_library() call, closed over (what a dependency may include is visible through
it only if it is declared too: an include needs a direct DEPS entry). Also checks that DEPS themselves stay within the table that
docs/architecture.md gives, that nothing includes upward, and that Boost, CLI11 and other edge libraries stay at the edge.

    tools/check_layers.py [--root DIR] [--print]     exit 1 and one line per violation
"""
import argparse
import pathlib
import re
import sys

# The tree, lowest first. A folder may only ever see folders above it in this list.
ORDER = ["base", "numeric", "quant", "schema", "io", "text", "method", "kernels", "attention",
         "pages", "ledger", "owner", "kv", "api", "model", "runtime", "eval", "apps"]
# Beyond base. io stands below schema in meaning (it includes nothing) although the tree lists it later.
MAY = {
    "base": [], "numeric": [], "io": [], "quant": ["numeric"], "schema": ["quant", "numeric", "io"], "text": ["io"],
    "method": ["schema", "quant"], "kernels": ["schema", "quant", "numeric"], "attention": ["kernels", "schema"],
    "pages": [], "ledger": ["pages", "schema", "io"], "owner": ["pages", "ledger", "schema", "io"],
    "kv": ["attention", "kernels", "pages", "ledger", "owner", "schema", "quant", "numeric"],
    "api": ["kv", "method", "owner", "ledger", "schema"],
    "model": ["kv", "kernels", "schema", "numeric", "io"],
    "runtime": ["model", "kv", "method", "schema", "text"],
    "eval": ["runtime", "model", "kv", "method", "schema", "quant", "text", "io"],
    "apps": ORDER,
}
# System and third-party headers that belong to one place.
EDGE = {"CLI/": ["apps"], "openssl/": ["io"], "pcre2.h": ["text"], "utf8proc.h": ["text"], "sys/mman.h": ["io", "pages", "owner"],
        "hwy/": ["kernels", "attention"], "nlohmann/": ["io", "schema", "text", "model", "apps"]}
# Folders that see the numbers of a row: the cache never sees a float.
NO_FLOATS = ["pages", "owner"]


def folder_of(path, src):
    parts = path.relative_to(src).parts
    return parts[1] if parts[0] == "cache" else parts[0]


def declared(root):
    deps = {}
    for file in list((root / "src").rglob("CMakeLists.txt")) + [root / "apps" / "CMakeLists.txt"]:
        if not file.exists():
            continue
        for name, body in re.findall(r"lq_library\((\w+)(.*?)\)\s*(?:\n|$)", file.read_text(), re.S):
            found = re.search(r"\bDEPS\s+((?:lq::\w+\s*)+)", body)
            deps[name] = [d[4:] for d in found.group(1).split()] if found else []
    return deps


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent)
    ap.add_argument("--print", action="store_true", help="print the real graph")
    args = ap.parse_args()
    src = args.root / "src"
    deps = declared(args.root)
    bad, graph = [], {}

    for name, list_of_deps in deps.items():
        for d in list_of_deps:
            if d != "base" and d not in MAY.get(name, []):
                bad.append(f"{name}: DEPS names lq::{d}, which the layer table does not allow")

    for path in sorted(list(src.rglob("*.h")) + list(src.rglob("*.cc")) + list(src.rglob("*.inc"))):
        here = folder_of(path, src)
        text = path.read_text()
        where = path.relative_to(args.root)
        for line, target in [(i + 1, m.group(1)) for i, row in enumerate(text.split("\n"))
                             for m in [re.match(r'\s*#\s*include\s+"([^"]+)"', row)] if m]:
            if target.startswith("hwy/"):  # Highway's own spelling: foreach_target.h re-includes by quotes
                if here not in EDGE["hwy/"]:
                    bad.append(f"{where}:{line}: \"{target}\" belongs to {', '.join(EDGE['hwy/'])}")
                continue
            if not (src / target).exists():
                bad.append(f"{where}:{line}: \"{target}\" is not under src/ (third-party headers take <>)")
                continue
            there = folder_of(src / target, src)
            graph.setdefault(here, set()).add(there)
            if there != here and there not in deps.get(here, []):
                bad.append(f"{where}:{line}: {here} includes {there}, which its CMakeLists.txt does not declare")
        for line, target in [(i + 1, m.group(1)) for i, row in enumerate(text.split("\n"))
                             for m in [re.match(r"\s*#\s*include\s+<([^>]+)>", row)] if m]:
            for prefix, homes in EDGE.items():
                if target.startswith(prefix) and here not in homes:
                    bad.append(f"{where}:{line}: <{target}> belongs to {', '.join(homes)}")
        if here in NO_FLOATS:
            code = re.sub(r"//[^\n]*|\"[^\"\n]*\"", "", text)
            for m in re.finditer(r"\b(float|double)\b", code):
                bad.append(f"{where}: the cache never sees a float: '{m.group(1)}'")
    # Whoever embeds the library sees its installed headers alone: so do the Python module and the examples.
    for outside in ("include", "python", "examples"):
        for path in sorted((args.root / outside).rglob("*.*")):
            if path.suffix not in (".h", ".hpp", ".cc"):
                continue
            for line, row in enumerate(path.read_text().split("\n"), 1):
                m = re.match(r'\s*#\s*include\s+[<"]([^">]+)[">]', row)
                if m and (src / m.group(1)).exists():
                    bad.append(f"{path.relative_to(args.root)}:{line}: {outside}/ includes {m.group(1)} of src/; include/livequant alone is its")
    for name, list_of_deps in deps.items():
        for d in list_of_deps:
            if d not in graph.get(name, set()) and name != "base":
                bad.append(f"{name}: declares lq::{d} but includes nothing of it")

    if args.print:
        for name in ORDER:
            print(f"{name:10s} -> {' '.join(sorted(graph.get(name, set()) - {name}))}")
    for b in bad:
        print(b)
    print(f"{len(deps)} folders, {sum(len(v) for v in graph.values())} edges, {len(bad)} violations")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
