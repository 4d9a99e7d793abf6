// text/tokenizer.cc: added tokens out -> normalizer -> normalized added tokens out -> pre-tokenizer -> model; and back.
#include "text/tokenizer.h"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <optional>
#include <utility>

#include "io/file.h"
#include "io/json.h"
#include "text/tokenizer_impl.h"
#include "text/tokenizer_json.h"
#include "text/utf8.h"

namespace livequant {
namespace {

constexpr int64_t kMaxTextBytes = std::numeric_limits<int32_t>::max();

// One call of Encode: the scratch of every stage.
class Encoder final : public PreTokenizer::Sink {
 public:
  Encoder(const Tokenizer::Impl& impl, std::vector<int32_t>* ids)
      : impl_(impl), ids_(ids), pre_tokenizer_(impl.pre_tokenizer) {
    if (const auto* bpe = std::get_if<BpeModel>(&impl.model)) bpe_.emplace(*bpe);
  }

  Status Text(std::string_view text) {  // UTF-8
    const auto token = [&](int32_t id) { ids_->push_back(id); };
    return impl_.raw_added.Split(
        text,
        [&](std::string_view raw) -> Status {
          bool first = raw.data() == text.data();
          std::string normal;
          if (impl_.normalizer.size() > 0) {
            LQ_ASSIGN_OR_RETURN(normal, impl_.normalizer.Apply(raw, &first));
            raw = normal;
          }
          return impl_.normalized_added.Split(
              raw,
              [&](std::string_view piece) {
                return pre_tokenizer_.Split(piece, first && piece.data() == raw.data(), *this);
              },
              token);
        },
        token);
  }

  Status Piece(std::string_view piece) override {
    if (bpe_) return bpe_->Encode(piece, ids_);
    return std::get<UnigramModel>(impl_.model).Encode(piece, &best_, ids_);
  }

 private:
  const Tokenizer::Impl& impl_;
  std::vector<int32_t>* ids_;
  PreTokenizer pre_tokenizer_;
  std::optional<BpeEncoder> bpe_;
  std::vector<UnigramModel::Best> best_;
};

}  // namespace

const Token* Tokenizer::Impl::Find(int32_t id) const {
  if (id >= 0 && static_cast<size_t>(id) < tokens.size() && tokens[static_cast<size_t>(id)].id == id)
    return &tokens[static_cast<size_t>(id)];
  const auto at =
      std::lower_bound(tokens.begin(), tokens.end(), id, [](const Token& t, int32_t i) { return t.id < i; });
  return at != tokens.end() && at->id == id ? &*at : nullptr;
}

Tokenizer Tokenizer::Of(std::shared_ptr<const Impl> impl) {
  Tokenizer tokenizer;
  tokenizer.impl_ = std::move(impl);
  return tokenizer;
}

Result<Tokenizer> Tokenizer::Parse(std::string_view json) {
  auto impl = std::make_shared<Impl>();
  LQ_RETURN_IF_ERROR(ParseTokenizerJson(json, impl.get()));
  return Of(std::move(impl));
}

Result<Tokenizer> Tokenizer::Load(const std::string& path) {
  LQ_ASSIGN_OR_RETURN(const std::string text, ReadFile(path, JsonLimits{}.max_bytes));
  Result<Tokenizer> tokenizer = Parse(text);
  if (!tokenizer.ok())
    return Status(tokenizer.status().code(), fmt::format("{}: {}", path, tokenizer.status().message()));
  return tokenizer;
}

Result<std::vector<int32_t>> Tokenizer::Encode(std::string_view text, bool add_special_tokens) const {
  if (static_cast<int64_t>(text.size()) > kMaxTextBytes)
    return Status(Code::kOutOfRange, fmt::format("text of {} bytes, limit {}", text.size(), kMaxTextBytes));
  if (const size_t at = InvalidUtf8At(text); at != text.npos)
    return Status(Code::kInvalidArgument, fmt::format("text is not UTF-8 at byte {} of {} (0x{:02x})", at, text.size(),
                                                      static_cast<unsigned char>(text[at])));
  std::vector<int32_t> ids;
  ids.reserve(text.size() / 4 + 16);
  if (add_special_tokens) ids = impl_->before;
  LQ_RETURN_IF_ERROR(Encoder(*impl_, &ids).Text(text));
  if (add_special_tokens) ids.insert(ids.end(), impl_->after.begin(), impl_->after.end());
  return ids;
}

Result<std::string> Tokenizer::TokenBytes(int32_t id, bool skip_special) const {
  const Token* token = impl_->Find(id);
  if (token == nullptr)
    return Status(Code::kOutOfRange,
                  fmt::format("token id {} is not in the vocabulary (ids below {})", id, vocab_size()));
  return token->special && skip_special ? std::string() : token->bytes;
}

Result<std::string> Tokenizer::Decode(std::span<const int32_t> ids, bool skip_special) const {
  std::string text;
  DecodedText decoded(impl_->decoder);
  for (const int32_t id : ids) {
    LQ_ASSIGN_OR_RETURN(const std::string any, TokenBytes(id, skip_special));
    const Token& token = *impl_->Find(id);
    if (token.special && skip_special) continue;
    decoded.Push(impl_->decoder, decoded.first() && impl_->decoder.first_differs() ? token.first : any, &text);
  }
  decoded.Finish(&text);
  return text;
}

int32_t Tokenizer::vocab_size() const { return impl_->tokens.back().id + 1; }
const std::string& Tokenizer::digest() const { return impl_->digest; }

StreamingDetokenizer::StreamingDetokenizer(const Tokenizer& tokenizer)
    : tokenizer_(tokenizer), state_(std::make_unique<DecodedText>(tokenizer.impl_->decoder)) {}
StreamingDetokenizer::~StreamingDetokenizer() = default;
StreamingDetokenizer::StreamingDetokenizer(StreamingDetokenizer&&) noexcept = default;

Result<std::string> StreamingDetokenizer::Push(int32_t id) {
  LQ_ASSIGN_OR_RETURN(const std::string any, tokenizer_.TokenBytes(id, false));
  const Token& token = *tokenizer_.impl_->Find(id);
  std::string text;
  if (token.special) return text;
  const DecoderSteps& steps = tokenizer_.impl_->decoder;
  state_->Push(steps, state_->first() && steps.first_differs() ? token.first : any, &text);
  return text;
}

std::string StreamingDetokenizer::Finish() {
  std::string text;
  state_->Finish(&text);
  *state_ = DecodedText(tokenizer_.impl_->decoder);
  return text;
}

}  // namespace livequant
