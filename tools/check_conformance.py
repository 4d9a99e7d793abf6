#!/usr/bin/env python3
"""docs/conformance.md says where each requirement of the source article is met, docs/state-machine.md which test watches each
transition and failure of state. Every test, page and command that they name must exist.

    tools/check_conformance.py [--root DIR]

A row's last column holds any of: `Suite.Test` (a GoogleTest), `command: livequant NAME ...`, `page: PATH`, `script: PATH`, or the word
open with a reason. A row with none of these is an error, so nothing can be left out in silence.
"""
import argparse
import pathlib
import re
import sys

PAGES = ["docs/conformance.md", "docs/state-machine.md"]
HEADERS = ["requirement", "symptom", "transition", "the id is", "use"]


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent)
    root = ap.parse_args().root
    tests = set()
    for path in (root / "tests").rglob("*.cc"):
        for suite, name in re.findall(r"\bTEST(?:_F|_P)?\(\s*(\w+)\s*,\s*(\w+)\s*\)", path.read_text()):
            tests.add(f"{suite}.{name}")
    commands = set(re.findall(r'add_subcommand\("([\w-]+)"', "".join(p.read_text() for p in (root / "apps").rglob("*.cc"))))
    bad, rows, opened, named = [], 0, 0, set()
    for page in PAGES:
        for n, line in enumerate((root / page).read_text().split("\n"), 1):
            cells = [c.strip() for c in line.strip().strip("|").split("|")]
            if not line.startswith("|") or len(cells) < 2 or set(cells[0]) <= set("-: ") or cells[0] in HEADERS:
                continue
            rows += 1
            where = cells[-1]
            found = False
            for token in re.findall(r"`([^`]+)`", where):
                if m := re.fullmatch(r"page: (\S+)", token):
                    found = True
                    if not (root / m.group(1).split("#")[0]).exists():
                        bad.append(f"{page}:{n}: no page {m.group(1)}")
                elif m := re.fullmatch(r"script: (\S+).*", token):
                    found = True
                    if not (root / m.group(1)).exists():
                        bad.append(f"{page}:{n}: no script {m.group(1)}")
                elif m := re.fullmatch(r"command: livequant ([\w-]+).*", token):
                    found = True
                    if m.group(1) not in commands:
                        bad.append(f"{page}:{n}: no command livequant {m.group(1)}")
                elif re.fullmatch(r"\w+\.\w+", token):
                    found = True
                    named.add(token)
                    if token not in tests:
                        bad.append(f"{page}:{n}: no test {token}")
            if re.search(r"\bopen\b", where):
                found = True
                opened += 1
            if not found:
                bad.append(f"{page}:{n}: names no test, command or page, and is not open")
    for b in bad:
        print(b)
    print(f"{rows} requirements, {opened} with an open part, {len(named)} tests named, {len(bad)} findings")
    sys.exit(1 if bad or rows == 0 else 0)


if __name__ == "__main__":
    main()
