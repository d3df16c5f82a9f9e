// Where all threads of a step meet. OpenMP's own barrier spins for milliseconds, which a machine that runs anything else beside
// us pays for with whole time slices: the thread that is waited for may need this very core.

#pragma once

#include <atomic>

namespace stretto {

class Barrier {
  public:
    // num: threads of the region, which OpenMP may make fewer than it was asked for.
    void wait(int num) {
        const int mine = round.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == num - 1) {
            arrived.store(0, std::memory_order_relaxed);
            round.store(mine + 1, std::memory_order_release);
            // notify_all looks whether anybody sleeps, and wakes nobody if it sees no one. Without the fence a processor may do
            // that load before the store above is visible: a thread that goes to sleep in between has read the old round,
            // is not seen, and sleeps for ever. x86 and Arm both reorder a store with a later load.
            std::atomic_thread_fence(std::memory_order_seq_cst);
            round.notify_all();
            return;
        }
        for (int spin = 0; spin < SPINS; spin++) {
            if (round.load(std::memory_order_acquire) != mine) return;
            pause();
        }
        round.wait(mine, std::memory_order_acquire);
    }

  private:
    static constexpr int SPINS = 1000;  // some 20 microseconds, several times what a phase of a small network takes

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }

    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int> round{0};
};

}  // namespace stretto
