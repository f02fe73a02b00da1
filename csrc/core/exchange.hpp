// The exchange of tensors between processes of one host, through memory that they share.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "kernels/kernels.hpp"

namespace quire {

struct ExchangeHeader;
struct ExchangeRank;

// A rank's waits for others since the region was made.
struct Waits {
    uint64_t ns = 0;
    uint64_t sleeps = 0;
};

// A region of memory for `size` ranks: a header, a line of counters for each rank, and two slots of
// data for each. It is anonymous memory behind a file descriptor: processes get the descriptor by
// inheritance or over a socket, no name exists, and the memory is freed with the last process that
// has it, whatever it died of.
//
// A collective is one or several pieces of at most a slot. For piece n every rank fills its slot
// n % 2, states that it has arrived at n, waits until all have, and reads their slots. One wait for
// each piece is enough: who has arrived at n + 1 has read the slots of n, so at n + 2, when all have
// arrived at n + 1, they may be filled again.
//
// Who waits spins for at most 1 ms, or 50 us where the wait before was longer or there are fewer
// cores than ranks, and then sleeps in the kernel. It looks every 100 ms whether the ranks that it
// waits for still exist: a rank holds a lock on a byte of the file, which the system releases when
// the process ends. The first who finds one gone aborts the exchange for all.
//
// Invariants:
// - only rank r writes its counters and slots, apart from `reset`, which needs all to be outside;
// - `arrived` of two ranks differ by one at most, until an abort;
// - a piece comes to its end on every rank or on none, whenever an abort falls.
//
// The slots of a piece lie side by side, by rank. After them comes memory that ranks write for each
// other, see `board`.
class Exchange {
   public:
    // The descriptor of a new region, closed on exec. Throws std::system_error, and everywhere but
    // on Linux.
    static int open_region(int size, int64_t slot_bytes);

    // Map the region; the descriptor stays the caller's. rank -1 only watches; another one joins,
    // once in the life of a region. Throws std::system_error, or std::invalid_argument for a
    // descriptor of something else, or a rank that has joined before.
    Exchange(int fd, int rank);
    ~Exchange();
    Exchange(const Exchange&) = delete;
    Exchange& operator=(const Exchange&) = delete;

    int rank() const { return rank_; }
    int size() const { return size_; }
    int64_t slot_bytes() const { return slot_bytes_; }

    // End every wait, now and until `reset`, with this reason; the first one counts.
    void abort(const std::string& reason);
    // The reason, or "".
    std::string aborted() const;
    // Make it usable again; no rank may be in a collective.
    void reset();
    // Collectives that each rank has finished since the region was made.
    std::vector<uint64_t> counts() const;

    std::vector<Waits> waits() const;  // of each rank

    // Rows of row_bytes, `stride` apart, of every rank -> out [num_rows, size, row_bytes]. With
    // to_first that is what rank 0 gets, and the `out` of others stays as it is.
    Status gather(const std::byte* x, int64_t stride, int64_t row_bytes, int64_t num_rows,
                  std::byte* out, bool to_first, Pool& pool);
    // Have `write` put this rank's part of some rows, at most capacity(row_bytes), into memory
    // [rows, size, row_bytes], and when all ranks have, `read` see the whole of it.
    template <class Write, class Read>
    Status share(const Write& write, const Read& read) {
        const uint32_t piece = next_piece();
        write(slot(0, piece));
        if (const Status status = meet(piece); status != Status::ok) return status;
        read(slot(0, piece));
        return Status::ok;
    }
    int64_t capacity(int64_t row_bytes) const { return slot_bytes_ / row_bytes; }
    // Memory that all ranks see, zero at first and as large as the largest that one has asked for.
    // The ranks say by `meet_all` when others may read what they have written, and must have met
    // again before they write it anew. Valid as long as the exchange. Throws std::system_error.
    std::byte* board(size_t num_bytes);
    Status meet_all();
    // A collective is over, which may be several pieces.
    void finish();
    // The largest of the ranks' numbers, one by one; NaN where one has NaN.
    Status largest(const float* x, int64_t stride, int64_t count, float* out);
    // Bytes of rank 0 -> `data` of the others.
    Status broadcast(std::byte* data, int64_t num_bytes);

   private:
    ExchangeRank& of(int rank) const;
    std::byte* slot(int rank, uint32_t piece) const;
    uint32_t next_piece() const;
    Status meet(uint32_t piece);
    bool wait_for(int rank, uint32_t piece);
    bool decide(uint32_t piece, bool gives_up);
    bool is_gone(int rank) const;
    void close_all();

    int rank_;
    int size_ = 0;
    int64_t slot_bytes_ = 0;
    int file_ = -1;  // a description of our own, which has our lock
    std::byte* memory_ = nullptr;
    size_t num_bytes_ = 0;
    struct Mapped {
        void* memory;
        size_t num_bytes;
    };
    std::vector<Mapped> boards_;  // the last one is the largest
    ExchangeHeader* header_ = nullptr;
    bool has_core_ = false;  // else a rank that is waited for may need ours
    bool was_long_ = false;  // the last wait
};

// The collectives as entries of programs; T is the number of rows.
struct GatherArgs {
    Exchange* exchange;
    const void* x;
    int64_t stride;     // bytes
    int64_t row_bytes;
    void* out;
    bool to_first;
};

struct LargestArgs {
    Exchange* exchange;
    const void* x;
    int64_t stride;  // numbers
    void* out;
};

struct MeetArgs {
    Exchange* exchange;
};

// A product whose inputs the ranks have a part of each: the partial sums of all are written where
// all can read them, and added there. `product` is a partial one, `sum` adds as many parts as there
// are ranks; y of the one and parts of the other do not matter. A row fits into a slot.
struct SharedProductArgs {
    Exchange* exchange;
    Kernel<LinearArgs> multiply;
    Kernel<LinearTotalArgs> add;
    LinearArgs product;
    LinearTotalArgs sum;
};

Status shared_product(const SharedProductArgs& args, int64_t tokens, Pool& pool);

Status exchange_gather(const GatherArgs& args, int64_t tokens, Pool& pool);
Status exchange_largest(const LargestArgs& args, int64_t tokens, Pool& pool);
Status exchange_meet(const MeetArgs& args, int64_t tokens, Pool& pool);

// Why the last collective of this thread ended with Status::aborted.
const std::string& abort_reason();

}  // namespace quire
