// tools/tokenizer_compare.mjs: our ids against those of the reference library, line by line.
//
//   npm install --prefix DIR @anush008/tokenizers@0.6.0
//   node tools/tokenizer_compare.mjs DIR TOKENIZER.json CORPUS.jsonl IDS.jsonl
//
// CORPUS by tools/tokenizer_corpus.py, IDS by build/dev/tests/text/tokenizer_ids. Exit 1 if any id differs, or if a line that
// is not UTF-8 was not refused at its offset. Decoded texts are compared too, and differences counted.
import { createRequire } from "node:module";
import fs from "node:fs";
import path from "node:path";

const [dir, file, corpus, ours] = process.argv.slice(2);
const { Tokenizer } = createRequire(path.resolve(dir, "x.js"))("@anush008/tokenizers");
const tokenizer = Tokenizer.fromFile(file);
const lines = fs.readFileSync(corpus, "utf8").trimEnd().split("\n").map((l) => JSON.parse(l));
const got = fs.readFileSync(ours, "utf8").trimEnd().split("\n").map((l) => JSON.parse(l));
let texts = 0, different = 0, errors = 0, refused = 0, wrong = 0, decoded = 0, ids = 0;
for (let i = 0; i < lines.length; ++i) {
  const line = lines[i];
  if (typeof line !== "string") {
    if ((got[i].error ?? "").includes(`not UTF-8 at byte ${line.at} of`)) ++refused;
    else { ++wrong; console.log(`line ${i}: not refused at ${line.at}: ${JSON.stringify(got[i])}`); }
    continue;
  }
  ++texts;
  const want = (await tokenizer.encode(line, null, { addSpecialTokens: false })).getIds();
  ids += want.length;
  if (got[i].error) { ++errors; if (errors <= 5) console.log(`line ${i}: ${JSON.stringify(line)}: ${got[i].error}`); continue; }
  if (JSON.stringify(want) !== JSON.stringify(got[i].ids)) {
    if (++different <= 8) console.log(`line ${i}: ${JSON.stringify(line).slice(0, 200)}\n  want ${JSON.stringify(want).slice(0, 300)}\n  got  ${JSON.stringify(got[i].ids).slice(0, 300)}`);
    continue;
  }
  const text = await tokenizer.decode(want, false);
  if (text !== got[i].text && ++decoded <= 3) console.log(`line ${i} decodes to ${JSON.stringify(got[i].text).slice(0, 200)}\n  want ${JSON.stringify(text).slice(0, 200)}`);
}
console.log(JSON.stringify({ file: path.basename(path.resolve(file, "../..")), texts, ids, different, errors, decoded_differently: decoded, refused, not_refused: wrong, ...got[lines.length] }));
process.exit(different + errors + wrong > 0 ? 1 : 0);
