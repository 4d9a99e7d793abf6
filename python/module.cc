// python/module.cc: the Python module `livequant`: include/livequant/livequant.hpp with Python's words, and nothing
// else.
//
// Rows come in by the buffer protocol or DLPack without a copy of ours (the C functions copy them once); what goes out
// is an Array, which is both. Every lq_status is an exception class below livequant.Error. The GIL is released while
// the cache works; a step that another thread is using is refused, not raced on.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <livequant/livequant.hpp>

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "python/arrays.h"

namespace livequant::python {
namespace {

using namespace py::literals;

// ---- errors ----

struct ErrorClass {
  lq_status status;
  const char* name;
  PyObject* const* also;  // what Python programs catch for the same mistake, or null
  const char* doc;
};
const ErrorClass kErrors[] = {
    {LQ_INVALID_ARGUMENT, "InvalidArgument", &PyExc_ValueError, "Malformed input or call: fix the call."},
    {LQ_NOT_FOUND, "NotFound", &PyExc_LookupError, "A named thing does not exist."},
    {LQ_UNSUPPORTED, "Unsupported", nullptr, "Well-formed, but nothing implements it."},
    {LQ_OUT_OF_RANGE, "OutOfRange", &PyExc_ValueError, "A value beyond a stated limit."},
    {LQ_NON_FINITE, "NonFinite", &PyExc_ValueError, "NaN or Inf among rows: the step is aborted, nothing changed."},
    {LQ_OUT_OF_PAGES, "OutOfPages", &PyExc_MemoryError, "The pool cannot hold the request; nothing was taken."},
    {LQ_STALE, "Stale", nullptr, "The sequence moved on since the step began."},
    {LQ_CLOSED, "Closed", nullptr, "The sequence was released."},
    {LQ_DUPLICATE_LAYER, "DuplicateLayer", nullptr, "The layer was prepared before."},
    {LQ_MISSING_LAYER, "MissingLayer", nullptr, "Publish before every layer was prepared."},
    {LQ_FAILED_STEP, "FailedStep", nullptr, "The step already failed; begin a fresh one."},
    {LQ_DATA_LOSS, "DataLoss", nullptr, "Bytes are not what they say they are."},
    {LQ_IO, "IoError", &PyExc_OSError, "A file cannot be read or written."},
    {LQ_CANCELLED, "Cancelled", nullptr, "Somebody asked to stop."},
    {LQ_OUT_OF_MEMORY, "OutOfMemory", &PyExc_MemoryError, "The machine has no more memory."}};

PyObject* error_base = nullptr;  // livequant.Error; both live as long as the process
std::array<PyObject*, LQ_OUT_OF_MEMORY + 1> error_classes = {};

PyObject* NewError(py::module_& m, const std::string& name, const char* doc, const py::object& bases) {
  PyObject* made = PyErr_NewExceptionWithDoc(("livequant." + name).c_str(), doc, bases.ptr(), nullptr);
  if (made == nullptr) throw py::error_already_set();
  m.attr(name.c_str()) = py::reinterpret_borrow<py::object>(made);
  return made;
}

void AddErrors(py::module_& m) {
  error_base = NewError(m, "Error", "What livequant refused; the sentence names the thing, the value and the limit.",
                        py::reinterpret_borrow<py::object>(PyExc_Exception));
  for (const ErrorClass& e : kErrors) {
    const auto base = py::reinterpret_borrow<py::object>(error_base);
    const py::object bases =
        e.also == nullptr ? base : py::object(py::make_tuple(base, py::reinterpret_borrow<py::object>(*e.also)));
    error_classes[e.status] = NewError(m, e.name, e.doc, bases);
  }
  py::register_exception_translator([](std::exception_ptr p) {
    try {
      if (p) std::rethrow_exception(p);
    } catch (const lq::Error& e) {
      PyObject* type = e.status() >= 0 && e.status() <= LQ_OUT_OF_MEMORY ? error_classes[e.status()] : nullptr;
      PyErr_SetString(type == nullptr ? error_base : type, e.what());
    }
  });
}

// ---- words for numbers ----

lq::Tensor TensorOf(const std::string& name) {
  if (name == "k") return lq::Tensor::kKeys;
  if (name == "v") return lq::Tensor::kValues;
  Refuse("tensor is \"" + name + "\"; \"k\" or \"v\"");
}

lq_part PartOf(const std::string& name) {
  const char* const names[] = {"codes", "scales", "zeros", "exact"};
  for (int i = LQ_CODES; i <= LQ_EXACT; ++i)
    if (name == names[i]) return static_cast<lq_part>(i);
  Refuse("part is \"" + name + "\"; \"codes\", \"scales\", \"zeros\" or \"exact\"");
}

template <class T>
void Take(const py::dict& from, const char* name, T* to, size_t* seen) {
  if (!from.contains(name)) return;
  *to = from[name].cast<T>();
  ++*seen;
}

lq::Rope RopeOf(const py::dict& d) {
  lq::Rope r;
  size_t seen = 0;
  Take(d, "type", &r.type, &seen), Take(d, "theta", &r.theta, &seen), Take(d, "dims", &r.dims, &seen);
  Take(d, "interleaved", &r.interleaved, &seen), Take(d, "factor", &r.factor, &seen);
  Take(d, "original_max_positions", &r.original_max_positions, &seen);
  Take(d, "low_freq_factor", &r.low_freq_factor, &seen), Take(d, "high_freq_factor", &r.high_freq_factor, &seen);
  Take(d, "beta_fast", &r.beta_fast, &seen), Take(d, "beta_slow", &r.beta_slow, &seen);
  Take(d, "truncate", &r.truncate, &seen), Take(d, "attention_factor", &r.attention_factor, &seen);
  if (seen != d.size())
    Refuse("rope has " + std::to_string(d.size()) + " fields, of which " + std::to_string(seen) +
           " are known: type, theta, dims, interleaved, factor, original_max_positions, low_freq_factor, "
           "high_freq_factor, beta_fast, beta_slow, truncate, attention_factor");
  return r;
}

// ---- objects ----

// The buffer that a cache's pages lie in, held by everything that may look at it.
using Memory = std::shared_ptr<py::buffer_info>;

struct PyCache {
  Memory memory;
  lq::Cache cache;
  int32_t max_q_heads;
};

struct PySequence {
  Memory memory;
  lq::Sequence sequence;
};

struct PyLease {
  Memory memory;
  std::optional<lq::Lease> lease;
  const lq::Lease& get() const {
    if (!lease.has_value()) throw lq::Error(LQ_CLOSED, "the lease has ended");
    return *lease;
  }
};

struct PyStep {
  Memory memory;
  lq::Schema schema;
  std::optional<lq::Step> step;
  bool busy = false;  // read and written with the GIL held

  lq::Step& get() {
    if (busy) Refuse("the step is in use by another thread");
    if (!step.has_value()) throw lq::Error(LQ_FAILED_STEP, "the step has ended");
    return *step;
  }
  // fn() without the GIL, while nobody else may use the step.
  template <class Fn>
  void Work(Fn&& fn) {
    get();
    struct Busy {
      bool& flag;
      explicit Busy(bool& f) : flag(f) { flag = true; }
      ~Busy() { flag = false; }
    } const mine(busy);
    const py::gil_scoped_release released;
    fn();
  }
  void Close() {
    if (busy) Refuse("the step is in use by another thread");
    step.reset();
  }
};

void CheckRows(const RowsView& v, const char* name, int64_t rows, int64_t width, const std::string& wide) {
  if (v.rows != rows || v.width != width)
    Refuse(std::string(name) + " holds " + std::to_string(v.rows) + " rows of " + std::to_string(v.width) +
           " values; the step has " + std::to_string(rows) + " rows of " + wide);
}

lq::Rows<const float> ToRows(const RowsView& v) {
  const int64_t values = v.rows == 0 ? 0 : (v.rows - 1) * v.stride + v.width;
  return {std::span<const float>(v.data, static_cast<size_t>(values)), v.stride};
}

void Prepare(PyStep& self, int32_t layer, const py::object& k, const py::object& v) {
  lq::Step& step = self.get();
  const lq_layer l = self.schema.Layer(layer);
  const RowsView keys = ViewRows(k, "k", false), values = ViewRows(v, "v", false);
  const std::string wide = std::to_string(l.num_kv_heads) + " KV heads of " + std::to_string(l.head_dim);
  CheckRows(keys, "k", step.rows(), int64_t{l.num_kv_heads} * l.head_dim, wide);
  CheckRows(values, "v", step.rows(), int64_t{l.num_kv_heads} * l.head_dim, wide);
  self.Work([&] { step.Prepare(layer, ToRows(keys), ToRows(values)); });
}

py::object Attend(PyStep& self, int32_t layer, const py::object& q, float scale, const py::object& out) {
  lq::Step& step = self.get();
  const lq_layer l = self.schema.Layer(layer);
  const RowsView queries = ViewRows(q, "q", false);
  const int64_t heads = queries.width / l.head_dim;
  if (queries.width % l.head_dim != 0 || heads < 1 || heads > (1 << 20))
    Refuse("q has rows of " + std::to_string(queries.width) + " values; whole heads of " + std::to_string(l.head_dim) +
           " are needed");
  const std::string wide = std::to_string(heads) + " heads of " + std::to_string(l.head_dim);
  CheckRows(queries, "q", step.rows(), queries.width, wide);
  py::object result = out;
  if (out.is_none()) result = py::cast(Array::Make(LQ_F32, {step.rows(), heads, l.head_dim}));
  const RowsView to = ViewRows(result, "out", true);
  CheckRows(to, "out", step.rows(), queries.width, wide);
  const size_t values = static_cast<size_t>((to.rows - 1) * to.stride + to.width);
  self.Work([&] {
    step.Attend(layer, ToRows(queries), static_cast<int32_t>(heads), scale,
                lq::Rows<float>(std::span<float>(to.data, values), to.stride));
  });
  return result;
}

std::unique_ptr<PyStep> Begin(PyCache& self, const std::vector<std::tuple<const PySequence*, int32_t, bool>>& list) {
  std::vector<lq::Append> requests;
  for (const auto& [sequence, rows, draft] : list) {
    if (sequence == nullptr) Refuse("a request's sequence is None");
    requests.push_back({&sequence->sequence, rows, draft});
  }
  std::optional<lq::Step> step;
  {
    const py::gil_scoped_release released;
    step.emplace(self.cache.Begin(requests));
  }
  return std::make_unique<PyStep>(PyStep{self.memory, self.cache.schema(), std::move(step)});
}

std::unique_ptr<PyCache> MakeCache(const lq::Schema& schema, int64_t max_len, int32_t max_q_heads,
                                   int32_t max_sequences, int64_t pool_tokens, int32_t max_step_rows, int32_t threads,
                                   bool allow_fallback, int64_t budget_bytes, const py::object& memory) {
  lq::Options o{.max_sequences = max_sequences,
                .max_len = max_len,
                .pool_tokens = pool_tokens,
                .max_step_rows = max_step_rows,
                .max_q_heads = max_q_heads,
                .threads = threads,
                .allow_fallback = allow_fallback,
                .budget_bytes = budget_bytes};
  Memory held;
  if (!memory.is_none()) {
    if (budget_bytes != 0) Refuse("budget_bytes is for memory of the cache's own; it must be 0 beside memory");
    held = std::make_shared<py::buffer_info>(memory.cast<py::buffer>().request(true));
    if (!PyBuffer_IsContiguous(held->view(), 'C')) Refuse("memory has gaps");
    if (held->size == 0) Refuse("memory holds no bytes");
    o.memory = {static_cast<std::byte*>(held->ptr), static_cast<size_t>(held->size * held->itemsize)};
  }
  return std::make_unique<PyCache>(PyCache{held, lq::Cache(schema, o), max_q_heads});
}

py::dict LedgerDict(const lq_ledger& b) {
  return py::dict("codes"_a = b.codes, "qparams"_a = b.qparams, "residual"_a = b.residual, "sparse"_a = b.sparse,
                  "exact_prefix"_a = b.exact_prefix, "pages"_a = b.pages, "slack"_a = b.slack,
                  "decode_read_bytes"_a = b.decode_read_bytes);
}

// ---- the classes ----

void AddArray(py::module_& m) {
  py::class_<Array>(
      m, "Array", py::buffer_protocol(),
      "A row-major array in host memory. numpy.asarray(a), memoryview(a) and torch.from_dlpack(a) share its "
      "memory. bfloat16, which buffers cannot say, is uint16 there and bfloat16 in DLPack.")
      .def_buffer([](const Array& a) { return a.Buffer(); })
      .def_property_readonly("shape", [](const Array& a) { return py::tuple(py::cast(a.shape())); })
      .def_property_readonly("dtype", [](const Array& a) { return a.type().name; })
      .def(
          "__dlpack__",
          [](const Array& a, const py::object& stream, const py::object& max_version, const py::object& dl_device,
             const py::object& copy) {
            (void)max_version;  // an unversioned capsule is what every consumer takes
            if (!stream.is_none()) Refuse("stream: host memory has none");
            if (!dl_device.is_none() && dl_device.cast<std::pair<int, int>>() != std::pair(1, 0))
              Refuse("dl_device: the array lies in host memory, (1, 0), and stays there");
            return a.Dlpack(!copy.is_none() && copy.cast<bool>());
          },
          py::kw_only(), "stream"_a = py::none(), "max_version"_a = py::none(), "dl_device"_a = py::none(),
          "copy"_a = py::none())
      .def("__dlpack_device__", [](const Array&) { return std::pair(1, 0); })
      .def("__repr__", [](const Array& a) {
        return "<livequant.Array " + std::string(a.type().name) + " " +
               std::string(py::str(py::tuple(py::cast(a.shape())))) + ">";
      });
  m.def("from_dlpack", &Array::FromDlpack, "tensor"_a,
        "An Array on the memory of any object with __dlpack__ in host memory: float32, float16, bfloat16 or uint8.");
}

void AddSchema(py::module_& m) {
  py::class_<lq::Schema>(m, "Schema", "What the bytes of a cache mean.")
      .def(py::init([](const std::string& text, int32_t layers, int32_t kv_heads, int32_t head_dim,
                       const std::optional<py::dict>& rope, const std::vector<int32_t>& windows,
                       const std::vector<int32_t>& layer_kv_heads, const std::vector<int32_t>& layer_head_dims) {
             lq::Shape shape{.num_layers = layers, .num_kv_heads = kv_heads, .head_dim = head_dim};
             if (rope.has_value()) shape.rope = RopeOf(*rope);
             shape.windows = windows, shape.kv_heads = layer_kv_heads, shape.head_dims = layer_head_dims;
             return lq::Schema(text, shape);
           }),
           "text"_a, py::kw_only(), "layers"_a, "kv_heads"_a = 0, "head_dim"_a = 0, "rope"_a = py::none(),
           "windows"_a = std::vector<int32_t>(), "layer_kv_heads"_a = std::vector<int32_t>(),
           "layer_head_dims"_a = std::vector<int32_t>(),
           "text: a preset name, or the JSON of a policy file. rope: a dict with the fields of lq_rope. windows, "
           "layer_kv_heads, layer_head_dims: a number a layer.")
      .def_property_readonly("digest", &lq::Schema::Digest)
      .def_property_readonly("layers", &lq::Schema::num_layers)
      .def(
          "layer",
          [](const lq::Schema& s, int32_t layer) {
            const lq_layer l = s.Layer(layer);
            return py::dict("kv_heads"_a = l.num_kv_heads, "head_dim"_a = l.head_dim, "window"_a = l.window,
                            "pinned_rows"_a = l.pinned_rows, "keys_before_rope"_a = l.keys_before_rope != 0);
          },
          "layer"_a)
      .def(
          "ledger", [](const lq::Schema& s, int64_t tokens) { return LedgerDict(s.Ledger(tokens)); }, "tokens"_a,
          "Bytes of one sequence of so many rows.");
}

void AddCache(py::module_& m) {
  py::class_<PyCache>(m, "Cache", "A pool of pages and the sequences in it; may be used from several threads.")
      .def(
          py::init(&MakeCache), "schema"_a, py::kw_only(), "max_len"_a, "max_q_heads"_a, "max_sequences"_a = 1,
          "pool_tokens"_a = 0, "max_step_rows"_a = 512, "threads"_a = 1, "allow_fallback"_a = false,
          "budget_bytes"_a = 0, "memory"_a = py::none(),
          "memory: a writable buffer aligned to 4096 bytes (an mmap is) of at least memory_bytes(...), held as long as "
          "the cache; else the cache takes its own, within budget_bytes if that is not 0.")
      .def_static(
          "memory_bytes",
          [](const lq::Schema& schema, int64_t max_len, int32_t max_q_heads, int32_t max_sequences, int64_t pool_tokens,
             int32_t max_step_rows, bool allow_fallback) {
            return lq::Cache::MemoryBytes(schema, {.max_sequences = max_sequences,
                                                   .max_len = max_len,
                                                   .pool_tokens = pool_tokens,
                                                   .max_step_rows = max_step_rows,
                                                   .max_q_heads = max_q_heads,
                                                   .allow_fallback = allow_fallback});
          },
          "schema"_a, py::kw_only(), "max_len"_a, "max_q_heads"_a, "max_sequences"_a = 1, "pool_tokens"_a = 0,
          "max_step_rows"_a = 512, "allow_fallback"_a = false)
      .def(
          "open", [](PyCache& c) { return std::make_unique<PySequence>(PySequence{c.memory, c.cache.Open()}); },
          "A new, empty sequence.")
      .def(
          "begin",
          [](PyCache& c, const PySequence& sequence, int32_t rows, bool draft) {
            return Begin(c, {{&sequence, rows, draft}});
          },
          "sequence"_a, "rows"_a, "draft"_a = false, "A step of one sequence.")
      .def("begin", &Begin, "requests"_a, "A step of a batch: a list of (sequence, rows, draft).")
      .def_property_readonly("used_bytes", [](const PyCache& c) { return c.cache.used_bytes(); })
      .def_property_readonly("fallback_calls", [](const PyCache& c) { return c.cache.fallback_calls(); });
}

void AddSequence(py::module_& m) {
  py::class_<PySequence>(m, "Sequence", "Rows of one request. Released when nobody refers to it, or by release().")
      .def("__len__", [](const PySequence& s) { return s.sequence.length(); })
      .def(
          "fork",
          [](const PySequence& s) { return std::make_unique<PySequence>(PySequence{s.memory, s.sequence.Fork()}); },
          "The same rows, shared; either side may go on.")
      .def(
          "truncate", [](PySequence& s, int64_t length) { s.sequence.Truncate(length); }, "length"_a)
      .def("release", [](PySequence& s) { s.sequence.Release(); })
      .def(
          "state",
          [](const PySequence& s) {
            const std::vector<std::byte> bytes = s.sequence.State();
            return py::bytes(reinterpret_cast<const char*>(bytes.data()), bytes.size());
          },
          "The stored bytes of every live row in canonical order: two states are equal if and only if these are.")
      .def(
          "lease",
          [](const PySequence& s) { return std::make_unique<PyLease>(PyLease{s.memory, s.sequence.Acquire()}); },
          "The rows as they are now, whatever happens to the sequence.");
}

void AddStep(py::module_& m) {
  py::class_<PyStep>(m, "Step", "One step of a batch; what was not published when it ends never happened.")
      .def_property_readonly("rows", [](PyStep& s) { return s.get().rows(); })
      .def(
          "first_row", [](PyStep& s, int32_t i) { return s.get().first_row(i); }, "request"_a = 0)
      .def(
          "count", [](PyStep& s, int32_t i) { return s.get().count(i); }, "request"_a = 0)
      .def(
          "position", [](PyStep& s, int32_t i) { return s.get().position(i); }, "request"_a = 0)
      .def(
          "prepare", &Prepare, "layer"_a, "k"_a, "v"_a,
          "Rows [rows, kv_heads, head_dim] or [rows, kv_heads * head_dim] of float32, keys at the schema's RoPE stage.")
      .def("attend", &Attend, "layer"_a, "q"_a, "scale"_a, "out"_a = py::none(),
           "softmax(scale q k^T) v for the layer prepared last; q [rows, q_heads, head_dim] or [rows, q_heads * "
           "head_dim]. "
           "Into `out` if it is given, else into a new Array; returns it.")
      .def(
          "publish",
          [](PyStep& s, const std::optional<std::vector<int32_t>>& accepted) {
            lq::Step& step = s.get();
            s.Work([&] { accepted.has_value() ? step.Publish(*accepted) : step.Publish(); });
          },
          "accepted"_a = py::none(), "Makes the rows visible, or the first accepted[i] of request i.")
      .def("close", &PyStep::Close)
      .def(
          "__enter__", [](PyStep& s) -> PyStep& { return s; }, py::return_value_policy::reference_internal)
      .def("__exit__", [](PyStep& s, const py::args&) { s.Close(); });
}

void AddLease(py::module_& m) {
  py::class_<PyLease>(m, "Lease", "A sequence as it was.")
      .def("__len__", [](const PyLease& l) { return l.get().length(); })
      .def(
          "read",
          [](const PyLease& l, int32_t layer, const std::string& tensor, int32_t head) {
            const std::vector<float> rows = l.get().Read(layer, TensorOf(tensor), head);
            const int64_t n = l.get().length();
            Array out = Array::Make(LQ_F32, {n, n == 0 ? 0 : static_cast<int64_t>(rows.size()) / n});
            if (!rows.empty()) std::memcpy(out.data(), rows.data(), rows.size() * sizeof(float));
            return out;
          },
          "layer"_a, "tensor"_a, "head"_a,
          "[length, head_dim] of keys (\"k\") or values (\"v\") as a later query reads them.")
      .def(
          "array",
          [](const PyLease& l, int32_t layer, const std::string& tensor, const std::string& part) {
            lq::Array a = l.get().ReadArray(layer, TensorOf(tensor), PartOf(part));
            return Array::Of(a.dtype, {a.shape[0], a.shape[1], a.shape[2]}, std::move(a.bytes));
          },
          "layer"_a, "tensor"_a, "part"_a,
          "The bytes at rest: \"codes\", \"scales\", \"zeros\" or \"exact\", as docs/formats/rows.md lays them out.")
      .def("close", [](PyLease& l) { l.lease.reset(); })
      .def(
          "__enter__", [](PyLease& l) -> PyLease& { return l; }, py::return_value_policy::reference_internal)
      .def("__exit__", [](PyLease& l, const py::args&) { l.lease.reset(); });
}

}  // namespace
}  // namespace livequant::python

PYBIND11_MODULE(livequant, m) {
  using namespace livequant::python;
  m.doc() =
      "A quantized, transactional, paged KV cache. A step: cache.begin, for each layer step.prepare and step.attend, "
      "step.publish. Rows are float32 in host memory, from anything with the buffer protocol or __dlpack__.";
  m.attr("__version__") = lq_version();
  AddErrors(m);
  AddArray(m);
  AddSchema(m);
  AddCache(m);
  AddSequence(m);
  AddStep(m);
  AddLease(m);
}
