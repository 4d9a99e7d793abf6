#!/usr/bin/env python3
"""What reviewers should not have to say twice: shape of files, docstrings of public functions, words that do not belong.

    tools/tidy.py [--root DIR]     exit 1 and one line per finding

Rules: files open with a comment that says what they are; headers have `#pragma once`; no tab, no trailing blank, lines of at most 140
columns; no unfinished marks; no branch on a preset's name outside method/; every public function or class of a header carries a docstring
(a comment directly above it or above its group); sources stay under 900 lines; every file under src/ is named in a CMakeLists.txt; fuzz
targets exist for parsers; no absolute path of a build machine.
"""
import argparse
import pathlib
import re
import subprocess
import sys

UNFINISHED = re.compile(r"\b(TO" r"DO|FIX" r"ME|X" r"XX|HA" r"CK)\b|not (yet )?implemented|\bDISABLED_[A-Z]")
PRESETS = r"f32|f16|bf16|fp8_e4m3|fp8_e5m2|int8|int4|int2|kivi4|kivi2|kivi2_sync|qserve8|qserve4"
# A comparison with a preset's name: == "kivi2", or "kivi2" ==.
BRANCH = re.compile(rf'(==|!=)\s*"({PRESETS})"|"({PRESETS})"\s*(==|!=)')
DECLARATION = re.compile(r"^(?:template\b.*|(?:(?:static|constexpr|inline|explicit|virtual|\[\[nodiscard\]\])\s+)*"
                         r"[A-Za-z_][\w:<>,\s*&]*?[\s*&]([A-Z]\w*)\s*\([^;{]*\)?[^;{]*[;{]?\s*)$")


def files(root):
    out = subprocess.run(["git", "-C", str(root), "ls-files"], capture_output=True, text=True)
    names = out.stdout.split("\n") if out.returncode == 0 else []
    return [root / n for n in names if n and (root / n).is_file()]


def public_functions(text):
    """(line, name, documented) of declarations at namespace or public class level of a header."""
    lines = text.split("\n")
    private, depth_private = False, 0
    result = []
    documented = False
    for i, line in enumerate(lines):
        s = line.strip()
        if s.startswith("//"):
            documented = True
            continue
        if s == "":
            documented = False
            continue
        if re.match(r"(private|protected):", s):
            private = True
        elif re.match(r"public:", s) or re.match(r"^(class|struct|enum|namespace)\b", line):
            private = False
        if re.match(r"^};?", line):
            private = False
        indent = len(line) - len(line.lstrip())
        if not private and indent in (0, 2) and not s.startswith(("#", "}", "return", "if", "for", "using", "friend", "LQ_", "case")):
            m = re.match(r"(?:template\s*<[^>]*>\s*)?(?:\[\[nodiscard\]\]\s*)?(?:(?:static|constexpr|inline|explicit)\s+)*"
                         r"[A-Za-z_][\w:<>, *&]*[\s*&]([A-Z][A-Za-z0-9]+)\(", s)
            if m and "=" not in s.split("(")[0] and not s.startswith("~"):
                result.append((i + 1, m.group(1), documented or "//" in line))
        # A docstring covers the group of lines that follows it without a blank line.
    return result


def main():
    ap = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    ap.add_argument("--root", type=pathlib.Path, default=pathlib.Path(__file__).resolve().parent.parent)
    root = ap.parse_args().root
    found, counted = [], 0
    cmake = "\n".join(p.read_text() for p in root.rglob("CMakeLists.txt") if "build" not in p.relative_to(root).parts)
    for path in files(root):
        rel = path.relative_to(root)
        if rel.parts[0] in ("models", "LICENSE") or rel.suffix not in (".h", ".hpp", ".cc", ".inc", ".py", ".sh", ".md", ".cmake", ".txt"):
            continue
        if rel.parts[0] == "fuzz" and "corpus" in rel.parts:
            continue
        counted += 1
        text = path.read_text(errors="replace")
        lines = text.split("\n")
        say = lambda n, what: found.append(f"{rel}:{n}: {what}")
        code = rel.suffix in (".h", ".hpp", ".cc", ".inc")
        # A header under src/ opens with its path, any other file with a comment; a .cc may open with its own header, whose words are its own.
        stem = rel.stem.removesuffix("_test") + ".h"
        if rel.suffix == ".h" and rel.parts[0] == "src" and not lines[0].startswith(f"// {'/'.join(rel.parts[1:])}:"):
            say(1, "opens without saying what it is (// path: what)")
        elif code and not lines[0].startswith("//") and not (lines[0].startswith("#include") and stem in lines[0]):
            say(1, "opens without saying what it is")
        if rel.suffix in (".h", ".hpp") and "#pragma once" not in text and not rel.name.endswith("-inl.h"):
            say(1, "no #pragma once")
        for n, line in enumerate(lines, 1):
            if code and len(line) > 140:
                say(n, f"{len(line)} columns, limit 140")
            if code and ("\t" in line or line != line.rstrip()):
                say(n, "tab or trailing blank")
            if rel.suffix in (".h", ".hpp", ".cc", ".py", ".sh") and rel.name != "tidy.py" and UNFINISHED.search(line):
                say(n, "looks unfinished")
            if rel.parts[0] == "src" and rel.parts[1] != "method" and BRANCH.search(line):
                say(n, "branches on a preset's name outside method/: the schema lacks a field")
            if re.search(r"/(work|home|root)/\w", line) and rel.suffix != ".md":
                say(n, "absolute path of a build machine")
        if code and len(lines) > 900:
            say(1, f"{len(lines)} lines: is this several rooms?")
        if rel.parts[0] == "src" and rel.suffix == ".cc" and rel.name not in cmake:
            say(1, "in no CMakeLists.txt")
        if rel.parts[0] == "src" and rel.suffix == ".h" and not rel.name.endswith(("-inl.h", "impl.h")):
            for n, name, documented in public_functions(text):
                if not documented:
                    say(n, f"{name}: public, no docstring")
    for f in found:
        print(f)
    print(f"{counted} files, {len(found)} findings")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
