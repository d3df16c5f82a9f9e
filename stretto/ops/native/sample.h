// Choice of tokens from logits: the most probable token, or a draw with a random number that is a function of seed and position
// (the same function as in stretto.engine.sampling).
//
// A row's result depends only on that row. Sums are in fp32 within a chunk and in fp64 over chunks.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "abi.h"
#include "product.h"

namespace stretto {

constexpr int CHUNK = 256;

// Random number in [0, 1) with 52 random bits: each word is mixed in with the finaliser of SplitMix64.
inline double uniform(uint64_t seed, uint64_t position) {
    uint64_t state = 0;
    for (uint64_t word : {seed, position, uint64_t(0)}) {
        state = (state ^ word) + 0x9E3779B97F4A7C15ull;
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9ull;
        state = (state ^ (state >> 27)) * 0x94D049BB133111EBull;
        state ^= state >> 31;
    }
    return double(state >> 12) * 0x1p-52;
}

// Index of the highest entry, the first among equals.
inline int argmax(const float* x, int num) {
    const float highest = highest_of(x, num);
    for (int begin = 0; begin < num; begin += CHUNK) {
        const int end = std::min(num, begin + CHUNK);
        bool found = false;
        for (int i = begin; i < end; i++) found |= x[i] == highest;
        if (!found) continue;
        for (int i = begin; i < end; i++)
            if (x[i] == highest) return i;
    }
    return 0;  // a row of NaN; its log-probability is NaN too
}

// Unnormalised probabilities of one row's tokens, with the sum of each chunk.
class Weights {
  public:
    // e^((logit − highest) / temperature)
    void of_logits(const float* logits, int num, float temperature) {
        size(num);
        highest = highest_of(logits, num);
        fill([&](int i, int count) {
            Vec v = count == LANES ? load(logits + i) : load_part(logits + i, count);
            return exp((v - highest) / temperature);
        });
    }

    // The first token whose cumulative sum exceeds `share` of the total.
    int draw(double share) const {
        double left = share * total;
        size_t chunk = 0;
        int last = 0;
        for (; chunk < sums.size(); chunk++) {
            if (left < sums[chunk]) break;
            left -= sums[chunk];
        }
        if (chunk == sums.size())
            for (chunk--; chunk > 0 && sums[chunk] == 0.0f;) chunk--;
        for (int i = int(chunk) * CHUNK; i < std::min(num, int(chunk + 1) * CHUNK); i++) {
            if (weight[i] <= 0.0f) continue;  // padding; a token's weight, an exponential, is positive
            last = i;
            if (left < weight[i]) break;
            left -= weight[i];
        }
        return last;  // the last token of the chunk, if rounding made the sum of the chunk too large
    }

    float highest = 0.0f;
    double total = 0.0;

  private:
    void size(int new_num) {
        num = new_num;
        sums.resize((num + CHUNK - 1) / CHUNK);
        weight.resize(sums.size() * CHUNK);
    }

    // f(i, count): weights [i, i + LANES), of which the first count are used
    template <class F>
    void fill(F f) {
        total = 0.0;
        for (size_t chunk = 0; chunk < sums.size(); chunk++) {
            Vec acc = {};
            for (int i = int(chunk) * CHUNK; i < int(chunk + 1) * CHUNK; i += LANES) {
                const int count = std::clamp(num - i, 0, LANES);
                Vec v = count ? f(i, count) : Vec{};
                for (int lane = count; lane < LANES; lane++) v[lane] = 0.0f;
                store(&weight[i], v);
                acc += v;
            }
            sums[chunk] = sum(acc);
            total += sums[chunk];
        }
    }

    int num = 0;
    std::vector<float> weight, sums;
};

inline void choose(const StrettoChoose& c) {
    // waking threads takes longer than computing a few short rows
    const int num_threads = long(c.num_sequences) * c.vocab < 200000 ? 1 : std::min(c.num_threads, c.num_sequences);
#pragma omp parallel num_threads(num_threads)
    {
        Weights target;
#pragma omp for schedule(dynamic, 1)
        for (int s = 0; s < c.num_sequences; s++) {
            const float* logits = c.logits + size_t(s) * c.vocab;
            const bool is_greedy = c.temperature[s] == 0.0f;
            const float temperature = is_greedy ? 1.0f : c.temperature[s];
            target.of_logits(logits, c.vocab, temperature);
            const int token = is_greedy ? argmax(logits, c.vocab) : target.draw(uniform(c.seed[s], uint64_t(c.position[s])));
            c.chosen[s] = token;
            c.logprob[s] = float((double(logits[token]) - target.highest) / temperature - std::log(target.total));
        }
    }
}

}  // namespace stretto
