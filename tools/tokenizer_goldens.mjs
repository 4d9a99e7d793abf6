// tools/tokenizer_goldens.mjs: small tokenizers of every kind, made here, with the ids and texts of the reference library.
//
//   npm install --prefix DIR @anush008/tokenizers@0.6.0
//   node tools/tokenizer_goldens.mjs DIR tests/text/tokenizer_goldens.json
import { createRequire } from "node:module";
import fs from "node:fs";
import path from "node:path";

const [dir, out] = process.argv.slice(2);
const { Tokenizer } = createRequire(path.resolve(dir, "x.js"))("@anush008/tokenizers");
const S = "\u2581";
const added = (id, content, more = {}) => ({ id, content, single_word: false, lstrip: false, rstrip: false, normalized: false, special: true, ...more });
const file = (parts) => ({ version: "1.0", truncation: null, padding: null, added_tokens: [], normalizer: null, pre_tokenizer: null, post_processor: null, decoder: null, ...parts });
const bpe = (tokens, merges, more) => ({ type: "BPE", dropout: null, unk_token: null, continuing_subword_prefix: null, end_of_word_suffix: null, fuse_unk: false, byte_fallback: false, ignore_merges: false, vocab: Object.fromEntries(tokens.map((t, i) => [t, i])), merges, ...more });
const bytes = [...Array(256).keys()].map((b) => `<0x${b.toString(16).toUpperCase().padStart(2, "0")}>`);
const metaspace = (more) => ({ type: "Metaspace", replacement: S, ...more });
const decoders = (...steps) => ({ type: "Sequence", decoders: steps });
const replace = (from, to) => ({ type: "Replace", pattern: { String: from }, content: to });

// SentencePiece's BPE.
const letters = ["<unk>", "<s>", "</s>", ...bytes, S, "a", "b", "c", "d", "1", "\u00e9", "\u4e2d", ".", "ab", S + "a", S + "ab", "abc", S + S, "cd", S + "abc"];
const merges = ["a b", S + " a", S + "a b", S + " ab", "ab c", S + " " + S, "c d", S + "ab c"];
const llama = { model: bpe(letters, merges, { unk_token: "<unk>", fuse_unk: true, byte_fallback: true }), added_tokens: [added(0, "<unk>"), added(1, "<s>"), added(2, "</s>")] };
const noBytes = letters.filter((t) => !t.startsWith("<0x") || t === "<0xE4>");
// Byte level: GPT-2's alphabet.
const alphabet = []; let next = 0x100;
for (let b = 0; b < 256; ++b) alphabet.push(String.fromCodePoint((b >= 0x21 && b <= 0x7e) || (b >= 0xa1 && b <= 0xac) || b >= 0xae ? b : next++));
const byteLevel = (pre, more = {}, model = {}) => file({ model: bpe([...alphabet, "ab", "\u0120a", "\u0120ab", "abc", "\u00c3\u00a9", "12"], [["a", "b"], ["\u0120", "a"], ["\u0120a", "b"], ["ab", "c"], ["\u00c3", "\u00a9"], ["1", "2"]], model), pre_tokenizer: pre, decoder: { type: "ByteLevel", add_prefix_space: true, trim_offsets: true, use_regex: true }, added_tokens: [added(262, "<|end|>"), added(263, "<r>", { rstrip: true, special: false }), added(264, "<l>", { lstrip: true }), added(265, "word", { single_word: true, special: false }), added(266, "N\u00e9", { normalized: true, special: false })], ...more });
const level = (prefix, regex) => ({ type: "ByteLevel", add_prefix_space: prefix, trim_offsets: true, use_regex: regex });
const split = (pattern, behavior, invert = false) => ({ type: "Split", pattern, behavior, invert });
const sequence = (...pretokenizers) => ({ type: "Sequence", pretokenizers });

// A double array for SentencePiece's charsmap, first fit.
function charsmap(map) {
  const blob = []; const root = { kids: new Map() };
  for (const [from, to] of Object.entries(map)) {
    let node = root;
    for (const b of Buffer.from(from)) { if (!node.kids.has(b)) node.kids.set(b, { kids: new Map() }); node = node.kids.get(b); }
    node.value = blob.length; blob.push(...Buffer.from(to), 0);
  }
  const units = [0]; const used = new Set([0]); const queue = [[root, 0]];
  while (queue.length) {
    const [node, pos] = queue.shift();
    const labels = [...(node.value === undefined ? [] : [0]), ...node.kids.keys()];
    if (!labels.length) continue;
    let base = 1; while (labels.some((l) => used.has(base ^ l))) ++base;
    for (const l of labels) used.add(base ^ l);
    units[pos] = ((units[pos] ?? 0) | ((pos ^ base) << 10) | (node.value === undefined ? 0 : 0x100)) >>> 0;
    if (node.value !== undefined) units[base] = (0x80000000 | node.value) >>> 0;
    for (const [l, kid] of node.kids) { units[base ^ l] = l; queue.push([kid, base ^ l]); }
  }
  const n = Math.max(...used) + 256;
  const data = Buffer.alloc(4 + 4 * n + blob.length);
  data.writeUInt32LE(4 * n, 0);
  for (let i = 0; i < n; ++i) data.writeUInt32LE(units[i] ?? 0xff, 4 + 4 * i);
  Buffer.from(blob).copy(data, 4 + 4 * n);
  return data.toString("base64");
}
const precompiled = { type: "Precompiled", precompiled_charsmap: charsmap({ "\ufb01": "fi", "\uff21": "A", "\r": " ", "\n": " ", "\u00a0": " ", "e\u0301": "\u00e9", "\u3000": " ", "\u00ad": "" }) };
const pieces = [["<unk>", 0], ["<s>", 0], ["</s>", 0], [S, -2], ["a", -3], ["b", -3.5], ["ab", -4], [S + "ab", -3.25], ["abc", -6], ["c", -4], ["\u4e2d", -7], ["i", -5], ["f", -5], ["fi", -6.5], ["\u00e9", -5.5], ["A", -6], ["xyz", -30]];
const unigram = (more) => ({ type: "Unigram", unk_id: 0, vocab: pieces, byte_fallback: false, ...more });
const specials = [added(0, "<unk>"), added(1, "<s>"), added(2, "</s>")];

const kinds = {
  llama_legacy: file({ ...llama, normalizer: { type: "Sequence", normalizers: [{ type: "Prepend", prepend: S }, replace(" ", S)] }, decoder: decoders(replace(S, " "), { type: "ByteFallback" }, { type: "Fuse" }, { type: "Strip", content: " ", start: 1, stop: 0 }) }),
  llama_first: file({ ...llama, pre_tokenizer: metaspace({ prepend_scheme: "first", split: false }), decoder: decoders(replace(S, " "), { type: "ByteFallback" }, { type: "Fuse" }, { type: "Strip", content: " ", start: 1, stop: 0 }) }),
  gemma: file({ ...llama, normalizer: replace(" ", S), pre_tokenizer: split({ String: " " }, "MergedWithPrevious"), decoder: decoders(replace(S, " "), { type: "ByteFallback" }, { type: "Fuse" }) }),
  unk_fused: file({ model: bpe(noBytes, merges, { unk_token: "<unk>", fuse_unk: true, byte_fallback: true }), added_tokens: [added(0, "<unk>")], pre_tokenizer: metaspace({ add_prefix_space: true }), decoder: metaspace({ add_prefix_space: true }) }),
  unk_apart: file({ model: bpe(noBytes, merges, { unk_token: "<unk>" }), added_tokens: [added(0, "<unk>")], pre_tokenizer: metaspace({ prepend_scheme: "never", split: true }), decoder: metaspace({ prepend_scheme: "never", split: true }) }),
  gpt2: byteLevel(level(false, true)),
  gpt2_prefix: byteLevel(level(true, true)),
  whole_pieces: byteLevel(sequence(split({ Regex: "\\p{N}{1,3}| ?\\p{L}+|\\s+" }, "Isolated"), level(false, false)), {}, { ignore_merges: true }),
  digits_nfc: byteLevel(sequence({ type: "Digits", individual_digits: true }, { type: "Punctuation", behavior: "Contiguous" }, level(false, true)), { normalizer: { type: "NFC" } }),
  removed: byteLevel(sequence({ type: "WhitespaceSplit" }, split({ String: "b" }, "Removed"), { type: "Digits", individual_digits: false }, level(false, false)), { normalizer: { type: "NFKC" } }),
  next_inverted: byteLevel(sequence(split({ Regex: "[^\\s]+" }, "MergedWithNext", true), split({ String: "c" }, "MergedWithPrevious"), { type: "Punctuation", behavior: "Isolated" }, level(false, false)), { normalizer: { type: "Sequence", normalizers: [{ type: "NFD" }, { type: "Lowercase" }, { type: "StripAccents" }] } }),
  t5: file({ model: unigram(), added_tokens: [...specials, added(17, "<x_0>", { rstrip: true }), added(18, "AB", { normalized: true, special: false })], normalizer: { type: "Sequence", normalizers: [precompiled, { type: "Strip", strip_left: false, strip_right: true }, { type: "Replace", pattern: { Regex: " {2,}" }, content: S }] }, pre_tokenizer: metaspace({ prepend_scheme: "always", split: true }), decoder: metaspace({ prepend_scheme: "always", split: true }) }),
  xlmr: file({ model: unigram(), added_tokens: [...specials, added(17, "<mask>", { lstrip: true })], normalizer: precompiled, pre_tokenizer: sequence({ type: "WhitespaceSplit" }, metaspace({ add_prefix_space: true })), decoder: metaspace({ add_prefix_space: true }) }),
  unigram_bytes: file({ model: unigram({ byte_fallback: true, vocab: [...pieces, ...bytes.map((b) => [b, -20])] }), added_tokens: specials, normalizer: { type: "Sequence", normalizers: [{ type: "Nmt" }, { type: "NFKD" }] }, pre_tokenizer: metaspace({ prepend_scheme: "first", split: true }), decoder: decoders({ type: "ByteFallback" }, metaspace({ prepend_scheme: "first", split: true })) }),
};
const texts = ["", " ", "  ", "a", "ab", " ab", "abc  ab abcd", "ab\nab\tab", "\u00e9 e\u0301 \u4e2d\u4e2d xyz xyzxyz", "\ud83d\ude00\ud83d\ude00ab", "<s>ab</s> ab", " <s> ab", "<unk>q", "1234 12 1,2.3!?", "word words a word.", "x <r>  y  <l>z", "<|end|> <|end|>ab", "N\u00e9 Ne\u0301", "\ufb01\uff21\u3000b\r\nc\u00a0", "A\u0301b AB ab", "<0x41><0xE4>", S + "ab" + S, "<x_0>  ab", "ab <mask>ab", "ab'll don't I'M", "\u200b\u0001a\u007f", "  ab  ", "\u4e2d\u00e9\u00f1q", "b\u00adb", "\u1e9b\u0323 \u212b \u01c4"];
const result = {};
for (const [name, json] of Object.entries(kinds)) {
  const tokenizer = Tokenizer.fromString(JSON.stringify(json));
  const cases = [];
  for (const text of texts) {
    const ids = (await tokenizer.encode(text, null, { addSpecialTokens: false })).getIds();
    cases.push({ text, ids, all: await tokenizer.decode(ids, false), plain: await tokenizer.decode(ids, true) });
  }
  result[name] = { json, cases };
}
fs.writeFileSync(out, JSON.stringify(result) + "\n");
