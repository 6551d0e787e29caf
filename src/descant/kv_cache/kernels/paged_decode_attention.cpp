// Adds to C vectors of the outputs of Q queries the weighted values of a block; the sums stay in registers.
template <int Q, int C>
static inline void add_weighted(
    float* const* outs, float* const* scores, int64_t at, const Scalar* v, int64_t e, int64_t size, int64_t E)
{
    Vec sums[Q][C];
    for (int j = 0; j < Q; j++)
        for (int c = 0; c < C; c++) sums[j][c] = Vec::loadu(outs[j] + e + c * W);
    for (int64_t s = 0; s < size; s++) {
        const Scalar* one = v + s * E + e;
        for (int c = 0; c < C; c++) {
            const Vec part = load(one + c * W);
            for (int j = 0; j < Q; j++) sums[j][c] = at::vec::fmadd(Vec(scores[j][at + s]), part, sums[j][c]);
        }
    }
    for (int j = 0; j < Q; j++)
        for (int c = 0; c < C; c++) sums[j][c].store(outs[j] + e + c * W);
}

template <int Q>
static inline void add_block(
    float* const* outs, float* const* scores, int64_t at, const Scalar* v, int64_t size, int64_t E)
{
    int64_t e = 0;
    for (; e + 4 * W <= E; e += 4 * W) add_weighted<Q, 4>(outs, scores, at, v, e, size, E);
    for (; e + W <= E; e += W) add_weighted<Q, 1>(outs, scores, at, v, e, size, E);
    for (; e < E; e++)
        for (int j = 0; j < Q; j++)
            for (int64_t s = 0; s < size; s++) outs[j][e] += scores[j][at + s] * v[s * E + e];
}

// The slabs, and the lines of `_Plan` in decode_attention.py, field by field.
struct Slab { Scalar* keys; Scalar* values; int64_t keys_head, values_head; };
struct Write { int64_t slab, slot, stop; };
struct Part { int64_t row, stop_row, block, stop_block; };
struct Block { int64_t slab, slot, position, size, reader, stop_reader; };

// For each part of the rows and key head: write the new keys and values, then block by block the scores of all
// queries that read it, the softmax of each query, and block by block the weighted sums of the values.
extern "C" void kernel(
    Scalar* out, const Scalar* query, const Scalar* key, const Scalar* value,
    const int64_t* slab_table, const int64_t* row_table, const int64_t* part_table, const int64_t* block_table,
    const int64_t* readers, const int64_t* layout, int64_t P, const float* scale)
{
    const Layout at = *reinterpret_cast<const Layout*>(layout);
    const int64_t H = at.heads, R = at.queries_of_head, D = at.key_size, E = at.value_size;
    const Slab* slabs = reinterpret_cast<const Slab*>(slab_table);
    const Write* writes = reinterpret_cast<const Write*>(row_table);
    const Part* parts = reinterpret_cast<const Part*>(part_table);
    const Block* blocks = reinterpret_cast<const Block*>(block_table);
    #pragma omp parallel if (P * H > 1)
    {
        std::vector<float> buffer, floats;  // scores; queries and outputs as floats
        std::vector<const float*> queries, own_queries;  // of a block's readers; of the part's rows
        std::vector<float*> scores, outs, own_outs;
        #pragma omp for collapse(2)
        for (int64_t p = 0; p < P; p++) {
            for (int64_t h = 0; h < H; h++) {
                const Part part = parts[p];
                const int64_t count = part.stop_row - part.row;
                int64_t stride = 0;
                for (int64_t n = part.row; n < part.stop_row; n++) {
                    const Write& own = writes[n];
                    const Slab& slab = slabs[own.slab];
                    std::memcpy(slab.keys + h * slab.keys_head + own.slot * D,
                                key + n * at.key_row + h * at.key_head, D * sizeof(Scalar));
                    std::memcpy(slab.values + h * slab.values_head + own.slot * E,
                                value + n * at.value_row + h * at.value_head, E * sizeof(Scalar));
                    stride = std::max(stride, own.stop);
                }
                if ((int64_t)buffer.size() < count * R * stride) buffer.resize(2 * count * R * stride);
                queries.resize(count * R); scores.resize(count * R); outs.resize(count * R);
                own_queries.resize(count * R); own_outs.resize(count * R);
                floats.resize(count * R * (D + E));
                for (int64_t i = 0; i < count * R; i++) {
                    const int64_t n = part.row + i / R, head = h * R + i % R;
                    float* copy = floats.data() + i * (D + E);
                    own_queries[i] = as_floats(query + n * at.query_row + head * at.query_head, D, copy);
                    own_outs[i] = output_sums(out + (n * H * R + head) * E, copy + D);
                }
                auto gather = [&](const Block& block) {  // what the queries that read a block have
                    int64_t j = 0;
                    for (int64_t i = block.reader; i < block.stop_reader; i++)
                        for (int64_t r = 0; r < R; r++, j++) {
                            const int64_t own = (readers[i] - part.row) * R + r;
                            queries[j] = own_queries[own];
                            scores[j] = buffer.data() + own * stride;
                            outs[j] = own_outs[own];
                        }
                    return j;
                };
                for (int64_t b = part.block; b < part.stop_block; b++) {
                    const Block& block = blocks[b];
                    const Slab& slab = slabs[block.slab];
                    const Scalar* k = slab.keys + h * slab.keys_head + block.slot * D;
                    const int64_t total = gather(block);
                    int64_t s = 0;
                    if (D % W == 0)
                        for (; s + W <= block.size; s += W)
                            score_tile(scores.data(), block.position + s, queries.data(), total, k + s * D, D);
                    for (; s < block.size; s++)
                        for (int64_t j = 0; j < total; j++)
                            scores[j][block.position + s] = dot(queries[j], k + s * D, D);
                }
                for (int64_t i = 0; i < count * R; i++) {
                    const int64_t stop = writes[part.row + i / R].stop;
                    float* one = buffer.data() + i * stride;
                    const float largest = *std::max_element(one, one + stop);
                    const float factor = 1 / softmax(one, largest, stop, *scale);
                    for (int64_t s = 0; s < stop; s++) one[s] *= factor;
                    std::memset(own_outs[i], 0, E * sizeof(float));
                }
                for (int64_t b = part.block; b < part.stop_block; b++) {
                    const Block& block = blocks[b];
                    const Slab& slab = slabs[block.slab];
                    const Scalar* v = slab.values + h * slab.values_head + block.slot * E;
                    const int64_t total = gather(block);
                    int64_t j = 0;
                    for (; j + 3 <= total; j += 3)
                        add_block<3>(outs.data() + j, scores.data() + j, block.position, v, block.size, E);
                    for (; j < total; j++)
                        add_block<1>(outs.data() + j, scores.data() + j, block.position, v, block.size, E);
                }
                for (int64_t i = 0; i < count * R; i++)
                    round_output(out + ((part.row + i / R) * H * R + h * R + i % R) * E, own_outs[i], E);
            }
        }
    }
}
