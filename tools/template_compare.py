#!/usr/bin/env python3
"""Our chat templates against Jinja2 (Debian's python3-jinja2), set up as transformers does.

    tools/template_compare.py build/dev/tests/text/template_render TEMPLATE.jinja...     exit 1 at any difference
    tools/template_compare.py --goldens tests/text/templates/goldens.json tests/text/templates/*.jinja

Conversations are made by a fixed seed: roles in and out of order, tool calls and replies, contents of every kind, empty and with white
space. An error of Jinja2 has to be an error of ours and the other way round. --goldens writes what Jinja2 says for the first 24 of them.
"""
import datetime
import json
import pathlib
import random
import subprocess
import sys
import tempfile

import jinja2
import jinja2.ext
import jinja2.sandbox

NOW = datetime.datetime(2024, 6, 10, 6, 13, 20)  # 1718000000
TEXTS = ["Hi", "  spaced  \n", "", "What is 2+2?\n\nThanks", "<think>\nhm\n</think>\n\nIt's 4.", "<reply>x</reply>", "ünï 中文 😀 \"q\" 'p' \\ \t",
         "a < b && c > d", "line1\r\nline2", "{{ not.a.tag }} {% x %}", "<|im_end|>", "'", "\u2028\u00a0x"]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "Weather \"now\" at a place", "parameters": {
    "type": "object", "properties": {"zip": {"type": "string"}, "city": {"type": "string", "enum": ["a", "b"]}}, "required": ["city"]}}},
         {"type": "function", "function": {"name": "add", "description": "", "parameters": {"type": "object", "properties": {}}, "return": {
             "type": "number"}}}]


class Generation(jinja2.ext.Extension):
    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.Scope(body).set_lineno(line)


def environment():
    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda f: NOW.strftime(f)
    return env


def conversations(count):
    rng = random.Random(7)
    cases = [{"messages": [{"role": "user", "content": "Hi"}], "add_generation_prompt": True, "bos_token": "<s>", "eos_token": "</s>"}]
    while len(cases) < count:
        messages = []
        if rng.random() < 0.4:
            text = rng.choice(TEXTS)
            messages.append({"role": "system", "content": text if rng.random() < 0.8 else [{"type": "text", "text": text}]})
        for i in range(rng.randint(0, 7)):
            role = ["user", "assistant"][i % 2] if rng.random() < 0.9 else rng.choice(["user", "assistant", "tool", "system", "other"])
            message = {"role": role, "content": rng.choice(TEXTS)}
            if rng.random() < 0.1:
                message["content"] = [{"type": "image"}, {"type": "text", "text": rng.choice(TEXTS)}]
            if rng.random() < 0.05:
                message["content"] = rng.choice([None, 3, True, 2.5, {"a": 1}])
            if role == "assistant" and rng.random() < 0.25:
                message["tool_calls"] = [{"id": "abcdefghi"[:rng.choice([9, 9, 4])], "type": "function", "function": {
                    "name": "weather", "arguments": rng.choice([{"city": "Köln", "n": 1.5, "deep": [1, None, True]}, '{"city": "x"}'])}}
                                         for _ in range(rng.choice([1, 1, 2]))]
                if rng.random() < 0.5:
                    message["content"] = None
            if role == "tool":
                message["tool_call_id"] = "abcdefghi"
            if rng.random() < 0.1:
                message["reasoning_content"] = "because"
            messages.append(message)
        case = {"messages": messages, "bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": rng.random() < 0.6}
        if rng.random() < 0.3:
            case["tools"] = TOOLS[:rng.randint(1, 2)]
        if rng.random() < 0.2:
            case["enable_thinking"] = rng.random() < 0.5
        if rng.random() < 0.2:
            case["date_string"] = "1 Jan 2025"
        cases.append(case)
    return cases


def render(env, source, case):
    try:
        return {"text": env.from_string(source).render(**case)}
    except (jinja2.exceptions.TemplateError, TypeError, ValueError, KeyError) as error:
        return {"error": f"{type(error).__name__}: {error}"}


def main():
    env = environment()
    if sys.argv[1] == "--goldens":
        cases = conversations(24)
        goldens = {"cases": cases, "templates": {}}
        for name in sys.argv[3:]:
            source = open(name, encoding="utf-8").read()
            goldens["templates"][pathlib.Path(name).stem] = [render(env, source, case).get("text") for case in cases]
        with open(sys.argv[2], "w", encoding="utf-8") as out:
            json.dump(goldens, out, ensure_ascii=False, indent=0)
            out.write("\n")
        return 0
    cases = conversations(500)
    wrong = 0
    with tempfile.NamedTemporaryFile("w", suffix=".jsonl") as file:
        for case in cases:
            file.write(json.dumps(case) + "\n")
        file.flush()
        for name in sys.argv[2:]:
            source = open(name, encoding="utf-8").read()
            run = subprocess.run([sys.argv[1], name, file.name], capture_output=True, text=True)
            if run.returncode != 0:
                print(name, run.stderr.strip())
                wrong += 1
                continue
            different = errors = 0
            for case, line in zip(cases, run.stdout.split("\n")):
                want, got = render(env, source, case), json.loads(line)
                errors += "error" in want
                if want.get("text") == got.get("text"):
                    continue
                different += 1
                if different <= 2:
                    print(f"{name}: {json.dumps(case)[:300]}\n  want {json.dumps(want)[:1500]}\n  got  {json.dumps(got)[:1500]}")
            print(f"{name}: {len(cases)} conversations, {errors} of them errors, {different} differ")
            wrong += different
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
