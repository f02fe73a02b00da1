// A list of calls, recorded once and replayed every step: what a CUDA graph is on a GPU.
#pragma once

#include <cstddef>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

#include "core/pool.hpp"
#include "kernels/kernels.hpp"

namespace quire {

// The calls of a model's forward pass in order. Arguments are copied; what they point to must live
// as long as the program. Between its calls a program is plain sequential code: there is no
// dependency analysis, and none is needed.
class Program {
   public:
    Program() = default;
    Program(const Program&) = delete;
    Program& operator=(const Program&) = delete;

    template <class Args>
    void append(Kernel<Args> kernel, const Args& args) {
        static_assert(std::is_trivially_copyable_v<Args>);
        static_assert(alignof(Args) <= alignof(std::max_align_t));
        auto copy = std::make_unique<std::byte[]>(sizeof(Args));
        entries_.push_back(
            {&call<Args>, reinterpret_cast<void (*)()>(kernel), new (copy.get()) Args(args), 0});
        args_.push_back(std::move(copy));
    }

    // A place where the caller of replay() runs something of its own, told apart by the number.
    void append_foreign(int number) { entries_.push_back({nullptr, nullptr, nullptr, number}); }

    size_t num_entries() const { return entries_.size(); }

    // Run the entries for this many tokens, up to the first whose status is not ok. `foreign` is
    // called with the pool's lease paused, so that it may run operations itself.
    template <class Foreign>
    Status replay(Pool& pool, int64_t tokens, const Foreign& foreign) const {
        Pool::Lease lease(pool);
        for (const Entry& entry : entries_) {
            Status status;
            if (entry.call != nullptr) {
                status = entry.call(entry, tokens, pool);
            } else {
                lease.pause();
                status = foreign(entry.number, tokens);
                lease.resume();
            }
            if (status != Status::ok) return status;
        }
        return Status::ok;
    }

   private:
    struct Entry {
        Status (*call)(const Entry&, int64_t tokens, Pool&);
        void (*kernel)();
        const void* args;
        int number;
    };

    template <class Args>
    static Status call(const Entry& entry, int64_t tokens, Pool& pool) {
        const auto kernel = reinterpret_cast<Kernel<Args>>(entry.kernel);
        return kernel(*static_cast<const Args*>(entry.args), tokens, pool);
    }

    std::vector<Entry> entries_;
    std::vector<std::unique_ptr<std::byte[]>> args_;
};

}  // namespace quire
