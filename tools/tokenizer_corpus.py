#!/usr/bin/env python3
"""A corpus that tokenizers disagree about, the same on every machine.

    tools/tokenizer_corpus.py OUT.jsonl [--lines 24000] [--heldout FILE]

One JSON string a line: sentences in many languages and scripts, every assigned block of Unicode up to version 14 in short runs, emoji
with joiners and modifiers, code, white space of every kind, digits, contractions, the text of special tokens; and mixtures of all of them.
`--heldout` adds lines of a text file (models/books-7m/eval/heldout_books.txt). The last 500 lines are {"hex": bytes, "at": offset}: not
UTF-8, to be refused at that offset.
"""
import argparse
import json
import random
import unicodedata

SENTENCES = r"""The quick brown fox jumps over the lazy dog; it wasn't amused, and we've told it so: "don't you'd better stop!"
I'm sure she'll say they're HERE'S what I'D do. IT'S 'twas o'clock rock'n'roll
Falsches Üben von Xylophonmusik quält jeden größeren Zwerg. Straße, Maß, ẞ, Fußgängerübergänge
Portez ce vieux whisky au juge blond qui fume; l'été, c'est déjà près de l'œuvre naïve d'Noël
El pingüino Wenceslao hizo kilómetros bajo exhaustiva lluvia y frío; añoraba a su querido cachorro. ¿Qué? ¡Olé!
Zażółć gęślą jaźń. Příliš žluťoučký kůň úpěl ďábelské ódy. Árvíztűrő tükörfúrógép. Iñtërnâtiônàlizætiøn
Съешь же ещё этих мягких французских булок, да выпей чаю. Чуєш їх, доцю, га? Жълтата дюля беше щастлива
Ξεσκεπάζω την ψυχοφθόρα βδελυγμία. Καλημέρα κόσμε· ὦ ἄνδρες Ἀθηναῖοι ᾧ
نص حكيم له سر قاطع وذو شأن عظيم مكتوب على ثوب أخضر ومغلف بجلد أزرق ١٢٣٤٥ لا إله ۴۵۶
דג סקרן שט בים מאוכזב ולפתע מצא חברה. שָׁלוֹם עֲלֵיכֶם
ऋषियों को सताने वाले दुष्ट राक्षसों के राजा रावण का सर्वनाश १२३ क्षत्रिय ज्ञान श्री
আমি কাঁচ খেতে পারি, তাতে আমার কোনো ক্ষতি হয় না। ৩৪৫
யாமறிந்த மொழிகளிலே தமிழ்மொழி போல் இனிதாவது எங்கும் காணோம் ஸ்ரீ க்ஷ
తెలుగు భాషలో వ్రాయబడిన వాక్యం ಕನ್ನಡ ಭಾಷೆ മലയാളം ഭാഷ ગુજરાતી ਪੰਜਾਬੀ සිංහල
เป็นมนุษย์สุดประเสริฐเลิศคุณค่า กว่าบรรดาฝูงสัตว์เดรัจฉาน ๑๒๓ ພາສາລາວ ភាសាខ្មែរ မြန်မာစာ
我能吞下玻璃而不伤身体。今天天气很好,我们去公园吧!「引號」《書名》 二〇二四年 第12章
いろはにほへと ちりぬるを。東京タワーは333メートルです。ﾊﾝｶｸ カタカナ ヴェネツィア パピプペポ
키스의 고유조건은 입술끼리 만나야 하고 특별한 기술은 필요치 않다. 한글 조합 각힣
Մայրենի լեզու ქართული ენა አማርኛ ቋንቋ ᏣᎳᎩ ᠮᠣᠩᠭᠣᠯ བོད་སྐད་ ᐃᓄᒃᑎᑐᑦ ߒߞߏ ⵜⴰⵎⴰⵣⵉⵖⵜ
Tiếng Việt: Nguyễn Đình Chiểu đã viết những câu thơ ấy từ rất lâu rồi. İstanbul'da ığdır ŞAPKA
for (int i = 0; i < n; ++i) { a[i] += b[i] * 0x1F; } // comment\treturn -1;
def f(x, *args, **kw):\n    \"\"\"doc\"\"\"\n    return {k: v for k, v in kw.items() if k != 'x'}  # noqa: E501\n\n
SELECT COUNT(*) FROM `t` WHERE a >= 3.14e-10 AND b <> '' -- x\r\n;\r\n\r\n<div class="a">&nbsp;&#x27;</div>
https://example.com/path?q=1&r=%20#frag user.name+tag@example.co.uk C:\\Windows\\System32 ~/.bashrc $PATH
\\begin{equation} \\sum_{i=0}^{\\infty} x_i^2 \\leq \\alpha \\end{equation} ∑∞∫√≠≤≥±×÷∂ℝ𝔸𝕏ℵ₀x²y³½¾Ⅷ①㊿
| a | b |\n|---|---|\n| 1 | 2 |\n\n- [ ] item\n  - **bold** _it_ `code`\n```cpp\nint x;\n```\n
1 12 123 1234 12345 1,234,567.89 0.001 -42 +7 3/4 1e10 ２０２４ 10:30 2024-01-01T00:00:00Z ٣٤ ①②③ Ⅻ ²³ ½
ABCdefGHI camelCaseWord snake_case_word kebab-case-word SCREAMING_CASE x1y2z3 iPhone15Pro v2.0.1-rc.3
fiancée fiancée Å Å Å ﬁ ﬃ ﷺ ㌀ ｱ ａｂｃ ẛ̣ q̣̇ q̣̇ ǆ ŉ ﬆ Ω Ω K ª º ™ ℃ № …""".split("\n")
EMOJI = ["😀", "👍🏽", "👨‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "1️⃣", "❤️", "🧑🏿‍🚀", "👩🏻‍❤️‍💋‍👨🏾", "☺️", "🏴󠁧󠁢󠁥󠁮󠁧󠁿", "🫠", "♀️", "✊🏼", "©️", "™", "➡️", "⛹🏽‍♀️"]
SPACES = [" ", "  ", "   ", "        ", "\t", "\n", "\r\n", "\r", "\n\n", "\n\n\n", "\v", "\f", "\u0085", "\u00a0", "\u1680", "\u2002",
          "\u2003", "\u2009", "\u200a", "\u2028", "\u2029", "\u202f", "\u205f", "\u3000", " \n", "\n ", "\t\t", " \t ", "\u200b", "\u200d",
          "\ufeff", "\u180e", "\u2060", "\u00ad", "\x00", "\x01", "\x1b", "\x1c", "\x7f", "\u2581", "\u2581\u2581"]
SPECIAL = ["<s>", "</s>", "<unk>", "<pad>", "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|eot_id|>",
           "<|start_header_id|>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<think>", "</think>", "<tool_call>", "<0x0A>",
           "<0xE2>", "<|im_start|", "<extra_id_0>", "<mask>", "[INST]", "[/INST]", "<|", "|>", "<<SYS>>", "<unused12>", "<table>", "<h1>"]
CONTRACTIONS = ["'s", "'S", "'t", "'re", "'VE", "'m", "'ll", "'LL", "'d", "'D", "’s", "'ſ", "''", "'", "'x", "n't", "'all", "'K"]
PUNCTUATION = list("!\"#$%&'()*+,-./:;<=>?@[\\]^_`{|}~") + ["...", "--", "===", "!!!", "?!", "«»", "„“", "—", "・", "。", "،", "।", "¿", "·", "′"]


def runs(rng):
    """Short runs of every block: characters assigned in Unicode 14 at most (what this Python knows beyond that is left out)."""
    blocks = [b for b in range(0x80, 0x20000, 0x40) if not 0xD800 <= b < 0xE000 and not 0xE000 <= b < 0xF900]
    blocks += list(range(0x20000, 0x31350, 0x800)) + [0xE0000, 0xE0100]
    for block in blocks:
        letters = [chr(c) for c in range(block, block + 0x40) if unicodedata.category(chr(c)) not in ("Cn", "Cs")]
        if not letters:
            continue
        for _ in range(4):
            yield "".join(rng.choice(letters) for _ in range(rng.randint(1, 12)))
        yield " ".join("".join(rng.choice(letters) for _ in range(rng.randint(1, 4))) for _ in range(4))
        yield "a" + rng.choice(letters) + "1" + rng.choice(letters) + " " + rng.choice(letters) + "'s"


def invalid(rng):
    """Bytes that are not UTF-8, with the offset of the first that is not."""
    parts = [b"\xff", b"\xc3", b"\xe2\x82", b"\xed\xa0\x80", b"\xf0\x9f\x98", b"\xc0\xaf", b"\x80", b"\xf4\x90\x80\x80", b"\xf8\x88\x80\x80\x80",
             b"\xe0\x80\xaf", b"\xfe"]
    while True:
        text = "".join(rng.choice(rng.choice(SENTENCES)) for _ in range(rng.randint(0, 20))).encode()
        line = text + rng.choice(parts) + rng.choice([b"", b" ", b"abc", "é".encode(), b"<s>"])
        try:
            line.decode()
        except UnicodeDecodeError as error:
            yield {"hex": line.hex(), "at": error.start}


def mixture(rng, runs_):
    kinds = [SENTENCES, EMOJI, SPACES, SPECIAL, CONTRACTIONS, PUNCTUATION, runs_]
    out = []
    for _ in range(rng.randint(1, 14)):
        piece = rng.choice(rng.choice(kinds))
        if len(piece) > 12 and rng.random() < 0.8:
            at = rng.randrange(len(piece))
            piece = piece[at:at + rng.randint(1, 16)]
        out.append(piece)
        if rng.random() < 0.3:
            out.append(str(rng.randint(0, 10**rng.randint(1, 9))))
        if rng.random() < 0.4:
            out.append(rng.choice(SPACES[:14]))
    return "".join(out)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out")
    parser.add_argument("--lines", type=int, default=24000)
    parser.add_argument("--heldout")
    args = parser.parse_args()
    rng = random.Random(20240601)
    run_list = list(runs(rng))
    lines = list(SENTENCES) + [s.replace("\\n", "\n").replace("\\t", "\t").replace("\\r", "\r") for s in SENTENCES]
    lines += ["", *EMOJI, *SPACES, *SPECIAL, *CONTRACTIONS, *PUNCTUATION]
    lines += [c * n for c in "a \n\t0!é中😀▁'" for n in (2, 3, 4, 7, 16, 33, 100, 1000)]
    lines += run_list
    if args.heldout:
        book = open(args.heldout, encoding="utf-8").read().split("\n")
        lines += rng.sample([b for b in book if b], 3000)
        lines += ["\n".join(book[i:i + 40]) for i in range(0, 2000, 40)]
    while len(lines) < args.lines - 500:
        lines.append(mixture(rng, run_list))
    bad = invalid(rng)
    with open(args.out, "w", encoding="utf-8") as out:
        for line in lines:
            out.write(json.dumps(line) + "\n")
        for _ in range(500):
            out.write(json.dumps(next(bad)) + "\n")
    print(f"{len(lines)} texts, {sum(len(s.encode()) for s in lines)} bytes, 500 lines that are not UTF-8")


if __name__ == "__main__":
    main()
