// livequant/livequant.h: a quantized, transactional, paged KV cache for somebody else's runtime. C, stable by
// struct_size.
//
// A step of a batch:
//   lq_begin -> for each layer: lq_step_prepare, lq_step_attend -> lq_step_publish -> lq_step_free
// Nothing is visible before publish; a step that is freed before it never happened.
//
// Every function that can fail gives an lq_status; the sentence that says what, which value and which limit is
// lq_last_error() of the same thread until its next failing call. Null where an object or a result is needed is
// LQ_INVALID_ARGUMENT, and any call may give LQ_OUT_OF_MEMORY; both are not said again below. A function that fails
// writes no result and changes nothing, but where it says so. Handles belong to whoever made them; null may be freed. A
// schema may be freed while caches made from it live on, a cache must outlive its steps and leases. Threads: one cache
// may be used from several threads; its prepare and attend calls run one after the other. A step and a lease belong to
// one thread at a time.
//
// A struct with struct_size may grow: a caller compiled against an older header says its smaller size, and the fields
// that it doesn't know are 0. A size that this library does not know is LQ_INVALID_ARGUMENT.
//
// Rows are f32. A row of keys or values is [num_kv_heads][head_dim], a row of queries or outputs
// [num_q_heads][head_dim], heads side by side; strides are floats from one row to the next, at least the length of a
// row.
#pragma once

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define LQ_API __attribute__((visibility("default")))
#else
#define LQ_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum lq_status {
  LQ_OK = 0,
  LQ_INVALID_ARGUMENT = 1, /* malformed input or call: fix the call */
  LQ_NOT_FOUND = 2,        /* a named thing does not exist */
  LQ_UNSUPPORTED = 3,      /* well-formed, but nothing implements it */
  LQ_OUT_OF_RANGE = 4,     /* a value beyond a stated limit */
  LQ_NON_FINITE = 5,       /* NaN or Inf among rows to be cached: the step is aborted, nothing changed */
  LQ_OUT_OF_PAGES = 6,     /* the pool cannot hold the request; nothing was taken */
  LQ_STALE = 7,            /* the sequence moved on since the step began */
  LQ_CLOSED = 8,           /* the sequence was released */
  LQ_DUPLICATE_LAYER = 9,
  LQ_MISSING_LAYER = 10, /* publish before every layer was prepared */
  LQ_FAILED_STEP = 11,   /* the step already failed; begin a fresh one */
  LQ_DATA_LOSS = 12,
  LQ_IO = 13,
  LQ_CANCELLED = 14,
  LQ_OUT_OF_MEMORY = 15
} lq_status;

typedef struct lq_schema lq_schema;
typedef struct lq_cache lq_cache;
typedef struct lq_step lq_step;
typedef struct lq_lease lq_lease;
typedef uint32_t lq_seq;

/* Why the last failing call of this thread failed. Never null; valid until that thread's next failing call. */
LQ_API const char* lq_last_error(void);
/* "0.1.0". */
LQ_API const char* lq_version(void);

/* ---- schema: what the bytes mean ---- */

/* A rotary embedding; the fields mean what they mean in a Hugging Face config.json (README, "Models"). A field
 * that the type uses must be said, one that it has no use for must be 0. */
typedef struct lq_rope {
  uint32_t struct_size;                     /* sizeof(lq_rope) */
  const char* type;                         /* "default", "linear", "llama3", "yarn" */
  double theta;                             /* 0: 10000 */
  int32_t dims;                             /* rotated channels of a head; 0: all */
  int32_t interleaved;                      /* pairs are 0: (i, i + dims / 2), 1: (2 i, 2 i + 1) */
  double factor;                            /* linear, llama3, yarn: >= 1 */
  int32_t original_max_positions;           /* llama3, yarn */
  double low_freq_factor, high_freq_factor; /* llama3 */
  double beta_fast, beta_slow;              /* yarn */
  int32_t no_truncate;                      /* yarn; 1: the two pairs are not rounded to whole ones */
  double attention_factor;                  /* yarn: what cos and sin are multiplied by */
} lq_rope;

/* What a model fixes of its cache. */
typedef struct lq_shape {
  uint32_t struct_size;           /* sizeof(lq_shape) */
  int32_t num_layers;             /* >= 1 */
  int32_t num_kv_heads, head_dim; /* of every layer; 0 where the arrays below say it */
  double rope_theta;              /* of the default type, all channels; 0: 10000, or `rope` says it */
  /* The rotary embedding of keys is part of what stored keys mean; the cache itself applies it only under a schema that
   * stores keys before it, and to pinned keys. Null: the default type with rope_theta. */
  const lq_rope* rope;
  /* Arrays [num_layers], or null. windows: rows that a query of the layer sees, its own included, 0 = all; null: all
   * everywhere. kv_heads and head_dims: of layers that are not alike; a policy must fit each geometry by itself. */
  const int32_t* windows;
  const int32_t* kv_heads;
  const int32_t* head_dims;
} lq_shape;

/* `text`: a preset name ("kivi2") or the JSON of a policy file (docs/formats/policy.md).
 * LQ_NOT_FOUND: no such preset; lists them. LQ_INVALID_ARGUMENT: a field of policy or shape, named. LQ_UNSUPPORTED: a
 * head size or window that the preset does not fit, an unknown RoPE type. LQ_OUT_OF_RANGE: beyond what a schema can
 * hold. */
LQ_API lq_status lq_schema_create(const char* text, const lq_shape* shape, lq_schema** out);
LQ_API void lq_schema_free(lq_schema* schema);
/* SHA-256, hex, of every field that decides about bytes; valid as long as the schema. */
LQ_API const char* lq_schema_digest(const lq_schema* schema);

/* -1: null. */
LQ_API int32_t lq_schema_num_layers(const lq_schema* schema);
typedef struct lq_layer {
  uint32_t struct_size; /* sizeof(lq_layer) */
  int32_t num_kv_heads, head_dim;
  int32_t window;           /* rows that a query sees; 0: all */
  int32_t pinned_rows;      /* leading rows that are never coded */
  int32_t keys_before_rope; /* 1: lq_step_prepare takes keys before RoPE, 0: after it */
} lq_layer;
/* Fills *out, whose struct_size the caller sets. LQ_INVALID_ARGUMENT: no such layer. */
LQ_API lq_status lq_schema_layer(const lq_schema* schema, int32_t layer, lq_layer* out);

typedef struct lq_ledger {
  int64_t codes, qparams, residual, sparse, exact_prefix, pages; /* bytes of live rows; their sum is the total */
  int64_t slack;                                                 /* page bytes that hold no row */
  int64_t decode_read_bytes;                                     /* what one decode step reads */
} lq_ledger;
/* Of one sequence of `tokens` rows. LQ_OUT_OF_RANGE: fewer than 0, or more than can be counted. */
LQ_API lq_status lq_schema_ledger(const lq_schema* schema, int64_t tokens, lq_ledger* out);

/* ---- cache ---- */

#define LQ_MEMORY_ALIGNMENT 4096

typedef struct lq_cache_options {
  uint32_t struct_size;   /* sizeof(lq_cache_options) */
  int32_t max_sequences;  /* open at once; 0: 1 */
  int64_t max_len;        /* rows of the longest sequence */
  int64_t pool_tokens;    /* rows that the pool can hold in all; 0: max_sequences * max_len */
  int32_t max_step_rows;  /* rows of the largest step, all sequences together; 0: 512 */
  int32_t max_q_heads;    /* query heads of the widest layer */
  int32_t threads;        /* that work on a step, the caller's included; 0: 1 */
  int32_t allow_fallback; /* read codings that no kernel reads by the slow reference path, counted; 0: refuse them */
  void* memory;           /* for pages, LQ_MEMORY_ALIGNMENT aligned, the caller's until the cache is freed; null: own */
  int64_t memory_bytes;   /* of `memory`, or a budget for own memory (0: none) */
} lq_cache_options;

/* Bytes that `memory` needs under these options (memory and memory_bytes are not looked at). LQ_INVALID_ARGUMENT: an
 * option, its value and its limit. LQ_UNSUPPORTED: a coding that no kernel reads, unless allow_fallback. */
LQ_API lq_status lq_cache_memory_bytes(const lq_schema* schema, const lq_cache_options* options, int64_t* out);
/* LQ_OUT_OF_RANGE: memory_bytes is too small; names the bytes needed and given, never a smaller context. Also threads
 * beyond 1024. LQ_INVALID_ARGUMENT, LQ_UNSUPPORTED: as above, and memory that is not aligned. */
LQ_API lq_status lq_cache_create(const lq_schema* schema, const lq_cache_options* options, lq_cache** out);
/* REQUIRES every step and lease of it to be freed. */
LQ_API void lq_cache_free(lq_cache* cache);
/* Pages handed out times their size. No errors of its own. */
LQ_API lq_status lq_cache_used_bytes(lq_cache* cache, int64_t* out);
/* Attention calls that the slow reference path served (allow_fallback). No errors of its own. */
LQ_API lq_status lq_cache_fallback_calls(lq_cache* cache, int64_t* out);

/* ---- sequences ---- */

/* Empty. LQ_OUT_OF_PAGES: max_sequences are open. */
LQ_API lq_status lq_sequence_open(lq_cache* cache, lq_seq* out);
/* The same rows, shared; either side may go on. LQ_CLOSED: the parent. LQ_OUT_OF_PAGES: as above. */
LQ_API lq_status lq_sequence_fork(lq_cache* cache, lq_seq parent, lq_seq* out);
/* To its first `length` rows. Steps of it that are under way become stale. LQ_CLOSED.
 * LQ_INVALID_ARGUMENT: a length below 0 or beyond the rows that are there. LQ_OUT_OF_RANGE: one at which a window has
 * dropped rows that the next query sees. LQ_OUT_OF_PAGES: no room for one more view of the sequence. */
LQ_API lq_status lq_sequence_truncate(lq_cache* cache, lq_seq seq, int64_t length);
/* Its rows are given back when the last lease on them ends. LQ_CLOSED: it was released before. */
LQ_API lq_status lq_sequence_release(lq_cache* cache, lq_seq seq);
/* Published rows. LQ_CLOSED. */
LQ_API lq_status lq_sequence_length(lq_cache* cache, lq_seq seq, int64_t* out);
/* The stored bytes of every live row in canonical order, independent of where pages lie: two states are equal if and
 * only if these are. Writes at most `capacity` bytes to `out` (may be null if capacity is 0) and gives the whole size.
 * LQ_CLOSED. LQ_INVALID_ARGUMENT: a negative capacity. */
LQ_API lq_status lq_sequence_state(lq_cache* cache, lq_seq seq, void* out, int64_t capacity, int64_t* bytes);

/* ---- a step ---- */

typedef struct lq_append {
  lq_seq seq;
  int32_t rows;  /* >= 1 */
  int32_t draft; /* 1: some prefix of the rows will be published; the step may then hold fewer rows than asked */
} lq_append;

/* All of the requests or none. LQ_INVALID_ARGUMENT: no request, rows below 1, more rows than max_step_rows, a sequence
 * twice. LQ_OUT_OF_RANGE: beyond max_len. LQ_OUT_OF_PAGES: the pool is full. LQ_CLOSED: a sequence. */
LQ_API lq_status lq_begin(lq_cache* cache, const lq_append* requests, int32_t count, lq_step** out);
/* Rows of all sequences together. */
LQ_API int32_t lq_step_rows(const lq_step* step);
/* Of the i-th request: index of its first row in the step, its rows, the position of its first row. -1: no such
 * request. */
LQ_API int32_t lq_step_first_row(const lq_step* step, int32_t i);
LQ_API int32_t lq_step_count(const lq_step* step, int32_t i);
LQ_API int64_t lq_step_position(const lq_step* step, int32_t i);
/* Rows of one layer, [lq_step_rows], keys at the schema's RoPE stage (after it, for every preset). They are copied, and
 * rounded once to the schema's exact dtype: attention reads what later steps will read. Any order of layers.
 * LQ_INVALID_ARGUMENT: no such layer, a stride below a row; with a stride the step goes on. These end the step, and
 * nothing happened: LQ_NON_FINITE (NaN, Inf or beyond the exact dtype; layer, tensor, position, head, channel and value
 * are named), LQ_OUT_OF_RANGE (a small scale that the schema refuses), LQ_DUPLICATE_LAYER. LQ_FAILED_STEP: it had
 * ended. */
LQ_API lq_status lq_step_prepare(lq_step* step, int32_t layer, const float* k, int64_t k_stride, const float* v,
                                 int64_t v_stride);
/* out = softmax(scale * q k^T) v over everything that each row may see, for the layer prepared last.
 * LQ_INVALID_ARGUMENT: another layer, heads that are no multiple of the KV heads or beyond max_q_heads, a stride below
 * a row; the step goes on. LQ_FAILED_STEP: it has ended. */
LQ_API lq_status lq_step_attend(lq_step* step, int32_t layer, const float* q, int64_t q_stride, int32_t num_q_heads,
                                float scale, float* out, int64_t out_stride);
/* Makes the rows visible: all of them (accepted null), or the first accepted[i] of request i, [requests of lq_begin].
 * Asked again after success it does nothing and gives LQ_OK. These end the step, and nothing happened:
 * LQ_MISSING_LAYER, LQ_INVALID_ARGUMENT (accepted beyond a request's rows, or fewer than all where it was no draft).
 * LQ_STALE, LQ_CLOSED: nothing happened to the sequences that are named; those beside them are published.
 * LQ_FAILED_STEP: it had ended. */
LQ_API lq_status lq_step_publish(lq_step* step, const int32_t* accepted);
/* Ends the step; one that was not published never happened. */
LQ_API void lq_step_free(lq_step* step);

/* ---- a lease: a sequence as it is now, whatever happens to it ---- */

/* LQ_CLOSED. */
LQ_API lq_status lq_lease_acquire(lq_cache* cache, lq_seq seq, lq_lease** out);
LQ_API void lq_lease_free(lq_lease* lease);
/* Rows; -1: null. */
LQ_API int64_t lq_lease_length(const lq_lease* lease);
/* Rows of one layer and KV head as a later query reads them, f32, out [length][head_dim]; tensor 0: keys, 1: values.
 * Rows that a window dropped are NaN. LQ_INVALID_ARGUMENT: no such layer, tensor or head. */
LQ_API lq_status lq_lease_read(lq_lease* lease, int32_t layer, int32_t tensor, int32_t head, float* out);

typedef enum lq_dtype { LQ_F32 = 0, LQ_F16 = 1, LQ_BF16 = 2, LQ_U8 = 3 } lq_dtype;
typedef enum lq_part { LQ_CODES = 0, LQ_SCALES = 1, LQ_ZEROS = 2, LQ_EXACT = 3 } lq_part;
typedef struct lq_array {
  uint32_t struct_size; /* sizeof(lq_array) */
  int32_t dtype;        /* lq_dtype */
  int64_t shape[3];     /* row major, without gaps; a 0 among them: the format has no such values here */
  int64_t bytes;
} lq_array;
/* The bytes of one layer's keys (tensor 0) or values (1) at rest, `part` an lq_part, as pages hold them without their
 * alignment: the arrays of docs/formats/rows.md. Fills *info, whose struct_size the caller sets, then writes the bytes
 * to `out` if it is not null. LQ_INVALID_ARGUMENT: no such layer, tensor or part. LQ_OUT_OF_RANGE: `out` is given and
 * capacity is below the bytes; *info is filled. LQ_UNSUPPORTED: a layer with a window, or a group that a truncate cut
 * in two. */
LQ_API lq_status lq_lease_array(lq_lease* lease, int32_t layer, int32_t tensor, int32_t part, lq_array* info, void* out,
                                int64_t capacity);

#ifdef __cplusplus
}
#endif
