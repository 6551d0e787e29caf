// The sums of R rows of the weight and L vectors stay in registers. Each has the same order for any R and L,
// so that a product does not depend on the others. For one vector the rows are read one after the other, as
// they lie in memory. The processor by itself fetches them too late.
constexpr int64_t BYTES_AHEAD = 4096, LINES = 60, ROWS = 4;

template <int R, int L>
static inline void multiply_tile(
    Scalar* out, int64_t stride, const Scalar* weight, const Scalar* bias, const float* vectors, int64_t size)
{
    Vec sums[R][L];
    for (int r = 0; r < R; r++)
        for (int l = 0; l < L; l++) sums[r][l] = Vec(0.0f);
    int64_t i = 0;
    for (; i + W <= size; i += W) {
        Vec own[R];
        for (int r = 0; r < R; r++) {
            own[r] = load(weight + r * size + i);
            __builtin_prefetch(reinterpret_cast<const char*>(weight + r * size + i) + BYTES_AHEAD);
        }
        for (int l = 0; l < L; l++) {
            const Vec one = load(vectors + l * size + i);
            for (int r = 0; r < R; r++) sums[r][l] = at::vec::fmadd(one, own[r], sums[r][l]);
        }
    }
    for (int l = 0; l < L; l++)
        for (int r = 0; r < R; r++) {
            float rest = bias ? static_cast<float>(bias[r]) : 0.0f;
            for (int64_t j = i; j < size; j++) rest += vectors[l * size + j] * weight[r * size + j];
            const auto add = [](Vec x, Vec y) { return x + y; };
            out[l * stride + r] = rest + at::vec::vec_reduce_all<float>(add, sums[r][l]);
        }
}

template <int R>
static inline void multiply_rows(
    Scalar* out, int64_t stride, const Scalar* weight, const Scalar* bias, const float* vectors, int64_t size,
    int64_t lines)
{
    const auto run = [&](auto multiply, int64_t count) {
        for (; lines >= count; lines -= count, out += count * stride, vectors += count * size)
            multiply(out, stride, weight, bias, vectors, size);
    };
    run(multiply_tile<R, 6>, 6);
    run(multiply_tile<R, 4>, 4);
    run(multiply_tile<R, 2>, 2);
    run(multiply_tile<R, 1>, 1);
}

// The products are written from column `start` on.
extern "C" void kernel(
    Scalar* out, const Scalar* given, const Scalar* weight, const Scalar* bias,
    int64_t start, int64_t stride, int64_t num_outputs, int64_t size, int64_t num_lines, int64_t has_bias)
{
    std::vector<float> floats(num_lines * size);
    const float* vectors = as_floats(given, num_lines * size, floats.data());
    for (int64_t line = 0; line < num_lines; line += LINES) {
        const int64_t lines = std::min(LINES, num_lines - line), rows = lines > 1 ? ROWS : 1;
        #pragma omp parallel for if (num_outputs * size > 32768)
        for (int64_t o = 0; o < num_outputs; o += rows) {
            Scalar* to = out + line * stride + start + o;
            const float* from = vectors + line * size;
            const int64_t count = std::min(rows, num_outputs - o);
            const Scalar* added = has_bias ? bias + o : nullptr;
            if (count == ROWS)
                multiply_rows<ROWS>(to, stride, weight + o * size, added, from, size, lines);
            else
                for (int64_t r = 0; r < count; r++) {
                    const Scalar* own = added ? added + r : nullptr;
                    multiply_rows<1>(to + r, stride, weight + (o + r) * size, own, from, size, lines);
                }
        }
    }
}
