// Reading a weight's values where they are before it is packed.
#pragma once

#include "kernels/kernels.hpp"

namespace quire::QUIRE_LEVEL {

// While one exists, rows that were not packed at its beginning are there.
class Reading {
   public:
    // In one order with the thread that packs: it sets is_packed, and then waits for readers.
    explicit Reading(const UnpackedRows* rows) : rows_(rows) {
        if (rows_ == nullptr || __atomic_load_n(&rows_->is_packed, __ATOMIC_ACQUIRE)) return;
        __atomic_add_fetch(&rows_->readers, 1, __ATOMIC_SEQ_CST);
        __atomic_add_fetch(&rows_->reads, 1, __ATOMIC_RELAXED);
        is_counted_ = true;
        is_needed_ = !__atomic_load_n(&rows_->is_packed, __ATOMIC_SEQ_CST);
    }
    ~Reading() {
        if (is_counted_) __atomic_sub_fetch(&rows_->readers, 1, __ATOMIC_SEQ_CST);
    }
    Reading(const Reading&) = delete;
    Reading& operator=(const Reading&) = delete;

    bool is_needed() const { return is_needed_; }

   private:
    const UnpackedRows* rows_;
    bool is_counted_ = false, is_needed_ = false;
};

}  // namespace quire::QUIRE_LEVEL
