// Two threads meet again and again in a Barrier. In turns one of them comes late by about as long as the other one spins, with stores
// that miss the cache just before it arrives, so that the store that opens the barrier is slow to become visible. A lost wake-up
// stops both threads for ever: a third one looks for that.
//
// With -DSTORE_BUFFER the program plays a processor that keeps its stores to itself for a millisecond, and threads that are interrupted
// just before they sleep: what real ones do once in minutes, and on some machines never, happens in every few rounds.
//
// Argument: seconds to run. Prints the number of rounds; the exit code is 1 where the threads stopped.

#include <chrono>
#include <climits>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <utility>
#include <vector>

#ifdef STORE_BUFFER
#include <atomic>

namespace std {

inline thread_local vector<pair<atomic<int>*, int>> stores;

inline void drain() {
    for (auto [place, value] : stores) place->store(value);
    stores.clear();
}

// Stands for std::atomic in the barrier. A thread sees its own stores; others see them after a fence, a read-modify-write or a while.
template <class Int> class buffered {
  public:
    buffered(Int initial) : value(initial) {}
    void store(Int stored, memory_order) { stores.push_back({&value, stored}); }
    Int fetch_add(Int added, memory_order) { return drain(), value.fetch_add(added); }
    Int load(memory_order) {
        for (size_t last = stores.size(); last-- > 0;)
            if (stores[last].first == &value) return stores[last].second;
        return value.load();
    }
    void wait(Int old, memory_order) {
        this_thread::sleep_for(chrono::microseconds(250 * (unsigned(old) % 8)));
        sleepers.fetch_add(1);
        value.wait(old);
        sleepers.fetch_sub(1);
    }
    // The load of the number of sleepers comes before the stores that are still in the buffer.
    void notify_all() {
        const bool any = sleepers.load() > 0;
        if (!stores.empty()) this_thread::sleep_for(chrono::milliseconds(1));
        drain();
        if (any) value.notify_all();
    }

  private:
    atomic<Int> value, sleepers{0};
};

inline void buffered_fence(memory_order) { drain(); }

}  // namespace std

#define atomic buffered
#define atomic_thread_fence buffered_fence
#include "barrier.h"
#undef atomic
#undef atomic_thread_fence
#else
#include "barrier.h"
#endif

namespace {

constexpr size_t BYTES = size_t(64) << 20;  // of each thread, more than its share of any cache
constexpr double PATIENCE_S = 5;  // without a round: a machine that is busy for so long does not run two threads at all

stretto::Barrier barrier;
std::atomic<long> rounds{0}, last{LONG_MAX};

double now_s() { return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count(); }

void meet(int number, double until_s) {
    std::vector<char> memory(BYTES);
    uint64_t state = 88172645463325252u + number;
    for (long round = 0; round <= last.load(); round++) {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        if ((round & 1) == number) {
            volatile uint64_t spin = 0;
            while (spin < 20000 + state % 60000) spin = spin + 1;  // some 10 to 60 microseconds
            for (int store = 0; store < 16; store++) memory[(state + store * 4194367u) % BYTES] = 1;
        }
        if (number == 0 && last.load() == LONG_MAX && now_s() > until_s) last.store(round + 1);
        barrier.wait(2);
        if (number == 0) rounds.store(round);
    }
}

}  // namespace

int main(int, char** arguments) {
    const double until_s = now_s() + std::atof(arguments[1]);
    std::atomic<bool> is_done{false};
    std::thread watch([&] {
        long seen = -1;
        for (double since_s = now_s(); !is_done.load(); std::this_thread::sleep_for(std::chrono::milliseconds(100))) {
            if (rounds.load() != seen) seen = rounds.load(), since_s = now_s();
            if (now_s() - since_s < PATIENCE_S) continue;
            std::printf("stopped after %ld rounds\n", seen);
            std::fflush(stdout);
            std::_Exit(1);
        }
    });
    std::thread other(meet, 1, until_s);
    meet(0, until_s);
    other.join();
    is_done.store(true);
    watch.join();
    std::printf("%ld rounds\n", rounds.load());
}
