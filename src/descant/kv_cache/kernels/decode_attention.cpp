// For each row and key head: write the new key and value, then for all query heads of the group the scores,
// their softmax, and the weighted sum of the values. The slots of a row are adjacent.
extern "C" void kernel(
    Scalar* out, const Scalar* query, const Scalar* key, const Scalar* value, Scalar* keys, Scalar* values,
    const int64_t* rows, const int64_t* starts, const int64_t* layout, const float* scale)
{
    const Layout at = *reinterpret_cast<const Layout*>(layout);
    const int64_t N = at.rows, H = at.heads, R = at.queries_of_head, D = at.key_size, E = at.value_size;
    #pragma omp parallel if (N * H > 1)
    {
        std::vector<float> buffer, floats(R * D + E);  // scores; queries and one output as floats
        std::vector<const float*> queries(R);
        std::vector<float*> scores(R);
        #pragma omp for collapse(2)
        for (int64_t n = 0; n < N; n++) {
            for (int64_t h = 0; h < H; h++) {
                const int64_t start = starts[n], stop = start + 1;
                Scalar* k = keys + rows[n] * at.keys_row + h * at.keys_head;
                Scalar* v = values + rows[n] * at.values_row + h * at.values_head;
                std::memcpy(k + start * D, key + n * at.key_row + h * at.key_head, D * sizeof(Scalar));
                std::memcpy(v + start * E, value + n * at.value_row + h * at.value_head, E * sizeof(Scalar));
                if ((int64_t)buffer.size() < R * stop) buffer.resize(2 * R * stop);
                for (int64_t r = 0; r < R; r++) {
                    const Scalar* one = query + n * at.query_row + (h * R + r) * at.query_head;
                    queries[r] = as_floats(one, D, floats.data() + r * D);
                    scores[r] = buffer.data() + r * stop;
                }
                int64_t s = 0;
                if (D % W == 0)
                    for (; s + W <= stop; s += W)
                        score_tile(scores.data(), s, queries.data(), R, k + s * D, D);
                for (; s < stop; s++)
                    for (int64_t r = 0; r < R; r++) scores[r][s] = dot(queries[r], k + s * D, D);
                for (int64_t r = 0; r < R; r++) {
                    float* p = scores[r];
                    Scalar* own = out + ((n * H + h) * R + r) * E;
                    float* o = output_sums(own, floats.data() + R * D);
                    const float largest = *std::max_element(p, p + stop);
                    const float factor = 1 / softmax(p, largest, stop, *scale);
                    int64_t e = 0;
                    for (; e + 4 * W <= E; e += 4 * W) weighted_sum<4>(o + e, p, v + e, stop, E, factor);
                    for (; e + W <= E; e += W) weighted_sum<1>(o + e, p, v + e, stop, E, factor);
                    for (; e < E; e++) {
                        float sum = 0;
                        for (int64_t s = 0; s < stop; s++) sum += p[s] * v[s * E + e];
                        o[e] = sum * factor;
                    }
                    round_output(own, o, E);
                }
            }
        }
    }
}
