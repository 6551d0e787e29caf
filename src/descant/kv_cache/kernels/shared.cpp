// Sizes, vectors and sums that all kernels share. Each is compiled behind this file, with `Scalar` defined.
#include <torch/csrc/inductor/cpp_prefix.h>
#include <algorithm>
#include <cstring>
#include <limits>
#include <vector>
using Vec = at::vec::Vectorized<float>;
using c10::BFloat16;
constexpr int64_t W = Vec::size();

// Sizes, and strides in elements, in the order of `KernelAttention._layout`.
struct Layout {
    int64_t rows, heads, queries_of_head, key_size, value_size;
    int64_t query_row, query_head, key_row, key_head, value_row, value_head;  // of the new vectors
    int64_t keys_row, keys_head, values_row, values_head;  // of the blocks of a dense store
};

static inline Vec load(const float* from) { return Vec::loadu(from); }
static inline Vec load(const BFloat16* from) {
    Vec out;
    at::vec::load_fp32_from_bf16(from, out);
    return out;
}

// Numbers as floats: themselves, or a copy in `buffer`.
static inline const float* as_floats(const float* from, int64_t, float*) { return from; }
static inline const float* as_floats(const BFloat16* from, int64_t size, float* buffer) {
    int64_t i = 0;
    for (; i + W <= size; i += W) load(from + i).store(buffer + i);
    for (; i < size; i++) buffer[i] = from[i];
    return buffer;
}

// Where an output is summed: in its place, or in `buffer`, from which `round_output` writes it.
static inline float* output_sums(float* out, float*) { return out; }
static inline float* output_sums(BFloat16*, float* buffer) { return buffer; }
static inline void round_output(float*, const float*, int64_t) {}
static inline void round_output(BFloat16* out, const float* sums, int64_t size) {
    int64_t i = 0;
    for (; i + 2 * W <= size; i += 2 * W)
        at::vec::convert_float_bfloat16(load(sums + i), load(sums + i + W)).store(out + i);
    for (; i < size; i++) out[i] = sums[i];
}

static inline float dot(const float* a, const Scalar* b, int64_t size) {
    Vec sum(0.0f), more(0.0f);
    int64_t d = 0;
    for (; d + 2 * W <= size; d += 2 * W) {
        sum = at::vec::fmadd(load(a + d), load(b + d), sum);
        more = at::vec::fmadd(load(a + d + W), load(b + d + W), more);
    }
    for (; d + W <= size; d += W) sum = at::vec::fmadd(load(a + d), load(b + d), sum);
    float rest = 0;
    for (; d < size; d++) rest += a[d] * b[d];
    return rest + at::vec::vec_reduce_all<float>([](Vec x, Vec y) { return x + y; }, sum + more);
}

static inline void transpose(const float* from, int64_t stride, float* tile) {
    at::vec::transpose_mxn<float, W, W>(from, stride, tile, W);
}
static inline void transpose(const BFloat16* from, int64_t stride, float* tile) {
    alignas(64) float rows[W * W];
    for (int64_t i = 0; i < W; i++) load(from + i * stride).store(rows + i * W);
    transpose(rows, W, tile);
}

// The scores of W slots, from slot `at` of each query on. A tile of keys is transposed once for all queries.
static inline void score_tile(
    float* const* scores, int64_t at, const float* const* queries, int64_t count, const Scalar* k, int64_t D)
{
    alignas(64) float tile[W * W];
    for (int64_t d = 0; d < D; d += W) {
        transpose(k + d, D, tile);
        for (int64_t j = 0; j < count; j++) {
            const float* one = queries[j] + d;
            Vec sum = d ? Vec::loadu(scores[j] + at) : Vec(0.0f), more(0.0f);
            for (int64_t i = 0; i < W; i += 2) {
                sum = at::vec::fmadd(Vec(one[i]), Vec::loadu(tile + i * W), sum);
                more = at::vec::fmadd(Vec(one[i + 1]), Vec::loadu(tile + (i + 1) * W), more);
            }
            (sum + more).store(scores[j] + at);
        }
    }
}

static inline float softmax(float* scores, float largest, int64_t size, float scale) {
    Vec total(0.0f), top(largest), factor(scale);
    int64_t s = 0;
    for (; s + W <= size; s += W) {
        Vec one = ((Vec::loadu(scores + s) - top) * factor).exp_u20();
        one.store(scores + s);
        total = total + one;
    }
    float rest = 0;
    for (; s < size; s++) {
        scores[s] = std::exp((scores[s] - largest) * scale);
        rest += scores[s];
    }
    return rest + at::vec::vec_reduce_all<float>([](Vec x, Vec y) { return x + y; }, total);
}

// The weighted sum of the values, a few vectors of the output at a time, which stay in registers.
template <int C>
static inline void weighted_sum(
    float* out, const float* p, const Scalar* v, int64_t size, int64_t dim, float factor)
{
    Vec sums[C];
    for (int c = 0; c < C; c++) sums[c] = Vec(0.0f);
    for (int64_t s = 0; s < size; s++) {
        const Vec weight(p[s]);
        const Scalar* one = v + s * dim;
        for (int c = 0; c < C; c++) sums[c] = at::vec::fmadd(weight, load(one + c * W), sums[c]);
    }
    for (int c = 0; c < C; c++) (sums[c] * Vec(factor)).store(out + c * W);
}
