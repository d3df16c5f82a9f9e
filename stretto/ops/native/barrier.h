// Barrier for the threads of a step. OpenMP's own barrier spins for milliseconds. If other programs use the machine, that costs
// whole time slices, because the thread that the others wait for may need the core of a spinning one.

#pragma once

#include <atomic>

namespace stretto {

class Barrier {
  public:
    // num: threads of the region; OpenMP may create fewer than requested.
    void wait(int num) {
        const int mine = round.load(std::memory_order_relaxed);
        if (arrived.fetch_add(1, std::memory_order_acq_rel) == num - 1) {
            arrived.store(0, std::memory_order_relaxed);
            round.store(mine + 1, std::memory_order_release);
            // notify_all reads whether threads sleep, and wakes none if it finds none. Without the fence, a processor may do
            // that load before the store above is visible. A thread that goes to sleep in between has read the old round and
            // is not woken, so it sleeps for ever. x86 and Arm both reorder a store with a later load.
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
    static constexpr int SPINS = 1000;  // about 20 microseconds, several times the duration of a phase of a small network

    static void pause() {
#if defined(__x86_64__)
        __builtin_ia32_pause();
#endif
    }

    alignas(64) std::atomic<int> arrived{0};
    alignas(64) std::atomic<int> round{0};
};

}  // namespace stretto
