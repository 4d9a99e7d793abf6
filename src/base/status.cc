#include "base/status.h"

namespace livequant {

const char* CodeName(Code code) {
  switch (code) {
    case Code::kOk: return "ok";
    case Code::kInvalidArgument: return "invalid_argument";
    case Code::kNotFound: return "not_found";
    case Code::kUnsupported: return "unsupported";
    case Code::kOutOfRange: return "out_of_range";
    case Code::kNonFinite: return "non_finite";
    case Code::kOutOfPages: return "out_of_pages";
    case Code::kStale: return "stale";
    case Code::kClosed: return "closed";
    case Code::kDuplicateLayer: return "duplicate_layer";
    case Code::kMissingLayer: return "missing_layer";
    case Code::kFailedTxn: return "failed_transaction";
    case Code::kDataLoss: return "data_loss";
    case Code::kIo: return "io";
    case Code::kCancelled: return "cancelled";
    case Code::kAccepted: return "accepted";
    case Code::kIdMismatch: return "id_mismatch";
    case Code::kIdExpired: return "id_expired";
  }
  LQ_CHECK(false);
}

std::string Status::ToString() const { return ok() ? "ok" : std::string(CodeName(code_)) + ": " + message_; }

}  // namespace livequant
