// Choosing tokens from logits: the most probable one, or a draw by a random number that is a function of seed, position
// and purpose (stretto.engine.sampling has the same function), and the rejection sampling of drafts.
//
// A row's result depends on that row alone. Sums run over chunks, in fp32 within one and in fp64 over them.
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "abi.h"
#include "product.h"

namespace stretto {

enum Purpose : uint64_t { SAMPLE = 0, DRAFT = 1, ACCEPT = 2, RESIDUAL = 3 };

constexpr int CHUNK = 256;

// [0, 1) with 52 random bits: each word is stirred in with the finaliser of SplitMix64.
inline double uniform(uint64_t seed, uint64_t position, uint64_t purpose) {
    uint64_t state = 0;
    for (uint64_t word : {seed, position, purpose}) {
        state = (state ^ word) + 0x9E3779B97F4A7C15ull;
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9ull;
        state = (state ^ (state >> 27)) * 0x94D049BB133111EBull;
        state ^= state >> 31;
    }
    return double(state >> 12) * 0x1p-52;
}

// Of several highest entries the first.
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
    return 0;  // a row of NaN; its log-probability tells
}

// Weights of one row's tokens, up to a factor: chunk by chunk, with the sum of each chunk.
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

    // max(target / total − draft, 0); where nothing is left, rounding alone has rejected, and the target stands in.
    void of_rest(const Weights& target, const float* draft) {
        size(target.num);
        fill([&](int i, int count) {
            Vec p = (count == LANES ? load(&target.weight[i]) : load_part(&target.weight[i], count)) / float(target.total);
            Vec rest = p - (count == LANES ? load(draft + i) : load_part(draft + i, count));
            return rest > 0.0f ? rest : Vec{};
        });
        if (!(total > 0.0)) *this = target;
    }

    // The target without one token, for a draft that was certain of it.
    void of_others(const Weights& target, int token) {
        *this = target;
        weight[token] = 0.0f;
        const int chunk = token / CHUNK, begin = chunk * CHUNK;
        Vec acc = {};
        for (int i = begin; i < begin + CHUNK; i += LANES) acc += load(&weight[i]);
        sums[chunk] = sum(acc);
        total = 0.0;
        for (float part : sums) total += part;
        if (!(total > 0.0)) *this = target;
    }

    float probability(int token) const { return float(weight[token] / total); }

    void probabilities(float* to) const {
        for (int i = 0; i < num; i++) to[i] = weight[i] / float(total);
    }

    // The first token at which the running sum exceeds that share of the total; never one of weight zero.
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
            if (weight[i] <= 0.0f) continue;
            last = i;
            if (left < weight[i]) break;
            left -= weight[i];
        }
        return last;  // the sum of the chunk was rounded up: its last token
    }

    float highest = 0.0f;
    double total = 0.0;

  private:
    void size(int new_num) {
        num = new_num;
        sums.resize((num + CHUNK - 1) / CHUNK);
        weight.resize(sums.size() * CHUNK);
    }

    // f(i, count): weights [i, i + LANES), of which count are real
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

// One sequence: `rows` holds the logits of its num + 1 rows, `draft` what its drafts were drawn by.
struct Chooser {
    Weights target, rest;

    void run(const StrettoChoose& c, int s, const float* rows, const int32_t* drafted, const float* const* draft, int32_t* chosen,
             float* logprob) {
        const bool is_greedy = c.temperature[s] == 0.0f;
        const int num = c.num_drafted[s];
        was_replaced = false;
        for (int step = 0;; step++) {
            const float* logits = rows + size_t(step) * c.vocab;
            const uint64_t position = uint64_t(c.position[s]) + step;
            const float temperature = is_greedy ? 1.0f : c.temperature[s];
            target.of_logits(logits, c.vocab, temperature);
            int token;
            if (is_greedy) token = argmax(logits, c.vocab);
            else if (step == num) token = target.draw(uniform(c.seed[s], position, SAMPLE));
            else token = verdict(c.seed[s], position, drafted[step], draft[step]);
            chosen[step] = token;
            logprob[step] = float((double(logits[token]) - target.highest) / temperature - std::log(target.total));
            if (step < num && token == drafted[step] && !was_replaced) continue;
            c.num_kept[s] = step;
            return;
        }
    }

  private:
    // The draft with probability min(1, target / draft) (Leviathan 2211.17192), else a token from what the target has more of.
    int verdict(uint64_t seed, uint64_t position, int token, const float* draft) {
        const float ours = target.probability(token), theirs = draft ? draft[token] : 1.0f;
        was_replaced = !(theirs > 0.0f && ours / theirs > uniform(seed, position, ACCEPT));
        if (!was_replaced) return token;
        if (draft) rest.of_rest(target, draft);
        else rest.of_others(target, token);
        return rest.draw(uniform(seed, position, RESIDUAL));
    }

    bool was_replaced = false;
};

inline void choose(const StrettoChoose& c) {
    std::vector<size_t> row(c.num_sequences + 1), at(c.num_sequences + 1);
    for (int s = 0; s < c.num_sequences; s++) {
        row[s + 1] = row[s] + c.num_drafted[s] + 1;
        at[s + 1] = at[s] + c.num_drafted[s];
    }
    // threads cost more to wake than a few short rows
    const int num_threads = row[c.num_sequences] * c.vocab < 200000 ? 1 : std::min(c.num_threads, c.num_sequences);
#pragma omp parallel num_threads(num_threads)
    {
        Chooser chooser;
#pragma omp for schedule(dynamic, 1)
        for (int s = 0; s < c.num_sequences; s++)
            chooser.run(c, s, c.logits + row[s] * c.vocab, c.drafted + at[s], c.draft + at[s], c.chosen + row[s], c.logprob + row[s]);
    }
}

}  // namespace stretto
