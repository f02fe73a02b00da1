#include "core/exchange.hpp"

#include <algorithm>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <new>
#include <stdexcept>
#include <system_error>

#include "core/parallel.hpp"
#include "core/spin.hpp"

#if defined(__linux__)
#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace quire {

constexpr uint64_t kMagic = 0x33454e4952495551;  // of this layout
constexpr size_t kReasonBytes = 1024;
constexpr int64_t kLookNs = 100'000'000;
constexpr int64_t kTileBytes = 64 << 10;  // of copies that several threads share

struct ExchangeHeader {
    uint64_t magic;
    int64_t size;
    int64_t slot_bytes;
    std::atomic<uint32_t> aborting;  // whoever sets it writes the reason, then sets `aborted`
    std::atomic<uint32_t> aborted;
    std::atomic<uint64_t> decided;  // 2 * the last piece that all came to, or 2 * the first one that
                                    // was aborted + 1
    char reason[kReasonBytes];
};

struct alignas(128) ExchangeRank {
    std::atomic<uint32_t> arrived;   // at this piece; waiters sleep on it
    std::atomic<uint32_t> sleepers;  // too many where one died, which costs system calls only
    std::atomic<uint32_t> joined;
    // on a line of their own: others poll the one before
    alignas(64) std::atomic<uint64_t> finished;
    std::atomic<uint64_t> waited_ns;
    std::atomic<uint64_t> sleeps;
};

static_assert(std::atomic<uint32_t>::is_always_lock_free);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

namespace {

constexpr size_t kPage = 4096;
static_assert(sizeof(ExchangeHeader) <= kPage);

thread_local std::string last_reason;

// Ranks that have a core each wait for each other as long as their shares of a product or the core's
// turn differ: sleeping, which takes about 50 us to end, costs every rank more than it spares. Where
// a wait was longer, a rank has lost its core to somebody, who can have ours.
constexpr uint64_t kLongSpinNs = 1'000'000;

uint64_t nanoseconds() {
    const auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

size_t data_offset(int64_t size) { return round_up(kPage + size * sizeof(ExchangeRank), kPage); }

size_t region_bytes(int64_t size, int64_t slot_bytes) {
    return data_offset(size) + 2 * size * slot_bytes;
}

[[noreturn]] void fail(const char* what) {
    throw std::system_error(errno, std::generic_category(), what);
}

// Whether `found`, a counter that wraps around, has reached `piece`.
bool has_reached(uint32_t found, uint32_t piece) {
    return static_cast<int32_t>(found - piece) >= 0;
}

#if defined(__linux__)
struct flock lock_of(int rank) {
    struct flock lock{};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = rank;
    lock.l_len = 1;
    return lock;
}

void sleep_on(std::atomic<uint32_t>& word, uint32_t seen) {
    const timespec timeout{0, kLookNs};
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}

void wake_all(std::atomic<uint32_t>& word) {
    syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}
#endif

}  // namespace

const std::string& abort_reason() { return last_reason; }

Status exchange_gather(const GatherArgs& args, int64_t tokens, Pool& pool) {
    return args.exchange->gather(static_cast<const std::byte*>(args.x), args.stride, args.row_bytes,
                                 tokens, static_cast<std::byte*>(args.out), args.to_first, pool);
}

Status shared_product(const SharedProductArgs& args, int64_t tokens, Pool& pool) {
    Exchange& exchange = *args.exchange;
    const int64_t width = args.sum.width, size = exchange.size();
    const int64_t most = exchange.capacity(width * static_cast<int64_t>(sizeof(float)));
    const int64_t x_row = args.product.x.token_stride * size_of(args.product.weight.type);
    const int64_t y_row = width * size_of(args.sum.type);
    for (int64_t first = 0; first < tokens; first += most) {
        const int64_t rows = std::min(most, tokens - first);
        LinearArgs product = args.product;
        product.x.data = static_cast<std::byte*>(product.x.data) + first * x_row;
        if (product.peaks != nullptr) product.peaks += first;
        LinearTotalArgs sum = args.sum;
        sum.y = static_cast<std::byte*>(sum.y) + first * y_row;
        if (sum.peaks != nullptr) sum.peaks += first;
        const Status status = exchange.share(
            [&](std::byte* parts) {
                auto* own = reinterpret_cast<float*>(parts) + exchange.rank() * width;
                product.y = {own, size * width, width};
                args.multiply(product, rows, pool);
            },
            [&](const std::byte* parts) {
                sum.parts = parts;
                args.add(sum, rows, pool);
            });
        if (status != Status::ok) return status;
    }
    exchange.finish();
    return Status::ok;
}

Status exchange_largest(const LargestArgs& args, int64_t tokens, Pool&) {
    return args.exchange->largest(static_cast<const float*>(args.x), args.stride, tokens,
                                  static_cast<float*>(args.out));
}

Status exchange_meet(const MeetArgs& args, int64_t, Pool&) { return args.exchange->meet_all(); }

#if defined(__linux__)

int Exchange::open_region(int size, int64_t slot_bytes) {
    if (size < 1 || slot_bytes < 1) throw std::invalid_argument("an exchange needs ranks and slots");
    slot_bytes = static_cast<int64_t>(round_up(slot_bytes, kPage));
    const int fd = memfd_create("quire-exchange", MFD_CLOEXEC);
    if (fd < 0) fail("memfd_create");
    const ExchangeHeader header{kMagic, size, slot_bytes, {0}, {0}, {0}, ""};
    const bool is_written =
        ftruncate(fd, static_cast<off_t>(region_bytes(size, slot_bytes))) == 0 &&
        pwrite(fd, static_cast<const void*>(&header), sizeof header, 0) == sizeof header;
    if (!is_written) {
        const int error = errno;
        close(fd);
        errno = error;
        fail("the memory of an exchange");
    }
    return fd;
}

Exchange::Exchange(int fd, int rank) : rank_(rank) {
    try {
        // A descriptor that was inherited shares its description, and so its locks, with others.
        file_ = open(("/proc/self/fd/" + std::to_string(fd)).c_str(), O_RDWR | O_CLOEXEC);
        if (file_ < 0) fail("the region of an exchange");
        struct stat found{};
        if (fstat(file_, &found) != 0) fail("the region of an exchange");
        num_bytes_ = static_cast<size_t>(found.st_size);
        if (num_bytes_ < kPage) throw std::invalid_argument("this is not an exchange's region");
        void* mapped = mmap(nullptr, num_bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file_, 0);
        if (mapped == MAP_FAILED) fail("the region of an exchange");
        memory_ = static_cast<std::byte*>(mapped);
        header_ = std::launder(reinterpret_cast<ExchangeHeader*>(memory_));
        size_ = static_cast<int>(header_->size);
        slot_bytes_ = header_->slot_bytes;
        has_core_ = size_ <= sysconf(_SC_NPROCESSORS_ONLN);
        // a rank that joined before may have made it longer
        if (header_->magic != kMagic || num_bytes_ < region_bytes(size_, slot_bytes_))
            throw std::invalid_argument("this is not an exchange's region");
        if (rank_ < -1 || rank_ >= size_)
            throw std::invalid_argument("rank " + std::to_string(rank_) + " of " +
                                        std::to_string(size_));
        if (rank_ >= 0) {
            if (of(rank_).joined.exchange(1) != 0)
                throw std::invalid_argument("rank " + std::to_string(rank_) + " joined before");
            struct flock lock = lock_of(rank_);
            if (fcntl(file_, F_OFD_SETLK, &lock) != 0) fail("the lock of a rank");
            of(rank_).joined.store(2);
        }
    } catch (...) {
        close_all();
        throw;
    }
}

void Exchange::close_all() {
    for (const Mapped& board : boards_) munmap(board.memory, board.num_bytes);
    boards_.clear();
    if (memory_ != nullptr) munmap(memory_, num_bytes_);
    if (file_ >= 0) close(file_);
}

std::byte* Exchange::board(size_t num_bytes) {
    num_bytes = round_up(std::max<size_t>(num_bytes, 1), kPage);
    if (boards_.empty() || boards_.back().num_bytes < num_bytes) {
        const size_t first = region_bytes(size_, slot_bytes_);
        struct stat found{};
        if (fstat(file_, &found) != 0) fail("the board of an exchange");
        // its last page: whatever other ranks do meanwhile, that neither makes the file shorter nor
        // changes what one of them has written there
        if (static_cast<size_t>(found.st_size) < first + num_bytes &&
            fallocate(file_, 0, static_cast<off_t>(first + num_bytes - kPage), kPage) != 0)
            fail("the board of an exchange");
        void* mapped = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_,
                            static_cast<off_t>(first));
        if (mapped == MAP_FAILED) fail("the board of an exchange");
        boards_.push_back({mapped, num_bytes});
    }
    return static_cast<std::byte*>(boards_.back().memory);
}

void Exchange::abort(const std::string& reason) {
    if (header_->aborting.exchange(1) == 0) {
        const size_t length = std::min(reason.size(), kReasonBytes - 1);
        std::memcpy(header_->reason, reason.data(), length);
        header_->reason[length] = 0;
    }
    header_->aborted.store(1);
    for (int rank = 0; rank < size_; ++rank) wake_all(of(rank).arrived);
}

void Exchange::reset() {
    for (int rank = 0; rank < size_; ++rank) {
        of(rank).arrived.store(0);
        of(rank).sleepers.store(0);
    }
    header_->decided.store(0);
    header_->reason[0] = 0;
    header_->aborting.store(0);
    header_->aborted.store(0);
}

bool Exchange::is_gone(int rank) const {
    if (of(rank).joined.load() != 2) return false;  // it may be starting
    struct flock lock = lock_of(rank);
    return fcntl(file_, F_OFD_GETLK, &lock) == 0 && lock.l_type == F_UNLCK;
}

// Wait until a rank has arrived at the piece; false if the exchange was aborted.
bool Exchange::wait_for(int rank, uint32_t piece) {
    ExchangeRank& other = of(rank);
    const auto is_over = [&] {
        return has_reached(other.arrived.load(std::memory_order_acquire), piece) ||
               header_->aborted.load(std::memory_order_relaxed) != 0;
    };
    if (is_over()) return has_reached(other.arrived.load(std::memory_order_acquire), piece);
    ExchangeRank& own = of(rank_);
    const uint64_t began = nanoseconds();
    std::chrono::nanoseconds spin = kSpin;
    if (has_core_ && !was_long_) spin = std::chrono::nanoseconds(kLongSpinNs);
    for (; !spin_until(is_over, spin); spin = kSpin) {
        own.sleeps.fetch_add(1, std::memory_order_relaxed);
        other.sleepers.fetch_add(1);
        const uint32_t seen = other.arrived.load();
        // An abort between these lines and the sleep is seen when the sleep times out.
        if (!has_reached(seen, piece) && header_->aborted.load() == 0) sleep_on(other.arrived, seen);
        other.sleepers.fetch_sub(1);
        if (!is_over() && is_gone(rank)) abort("rank " + std::to_string(rank) + " is gone");
    }
    const uint64_t waited = nanoseconds() - began;
    was_long_ = waited > kLongSpinNs;
    own.waited_ns.fetch_add(waited, std::memory_order_relaxed);
    return has_reached(other.arrived.load(std::memory_order_acquire), piece);
}

// Whether the piece counts for all ranks. The first who has seen all arrive, or gives up, decides it
// for everyone: otherwise one rank could go on with a step that another one has given up.
bool Exchange::decide(uint32_t piece, bool gives_up) {
    uint64_t seen = header_->decided.load();
    while (true) {
        const auto last = static_cast<uint32_t>(seen >> 1);
        if ((seen & 1) != 0) return !has_reached(piece, last);
        if (has_reached(last, piece)) return true;
        const uint64_t ours = uint64_t{piece} << 1 | static_cast<uint64_t>(gives_up);
        if (header_->decided.compare_exchange_weak(seen, ours)) return !gives_up;
    }
}

// State that we have arrived at the piece, and wait for all.
Status Exchange::meet(uint32_t piece) {
    ExchangeRank& own = of(rank_);
    own.arrived.store(piece);
    if (own.sleepers.load() != 0) wake_all(own.arrived);
    bool are_here = true;
    for (int rank = 0; are_here && rank < size_; ++rank) are_here = wait_for(rank, piece);
    if (decide(piece, !are_here)) return Status::ok;
    last_reason = aborted();
    return Status::aborted;
}

#else

int Exchange::open_region(int, int64_t) {
    throw std::system_error(ENOSYS, std::generic_category(), "shared memory of ranks needs Linux");
}
Exchange::Exchange(int, int rank) : rank_(rank) { open_region(0, 0); }
void Exchange::close_all() {}
std::byte* Exchange::board(size_t) { return nullptr; }
void Exchange::abort(const std::string&) {}
void Exchange::reset() {}
bool Exchange::decide(uint32_t, bool) { return false; }
Status Exchange::meet(uint32_t) { return Status::aborted; }

#endif

Exchange::~Exchange() { close_all(); }

ExchangeRank& Exchange::of(int rank) const {
    return *std::launder(
        reinterpret_cast<ExchangeRank*>(memory_ + kPage + rank * sizeof(ExchangeRank)));
}

std::byte* Exchange::slot(int rank, uint32_t piece) const {
    return memory_ + data_offset(size_) + ((piece & 1) * size_ + rank) * slot_bytes_;
}

uint32_t Exchange::next_piece() const {
    return of(rank_).arrived.load(std::memory_order_relaxed) + 1;
}

void Exchange::finish() { of(rank_).finished.fetch_add(1, std::memory_order_release); }

std::string Exchange::aborted() const {
    return header_->aborted.load() == 0 ? "" : std::string(header_->reason);
}

std::vector<uint64_t> Exchange::counts() const {
    std::vector<uint64_t> found;
    for (int rank = 0; rank < size_; ++rank) found.push_back(of(rank).finished.load());
    return found;
}

std::vector<Waits> Exchange::waits() const {
    std::vector<Waits> found;
    for (int rank = 0; rank < size_; ++rank)
        found.push_back({of(rank).waited_ns.load(), of(rank).sleeps.load()});
    return found;
}

Status Exchange::meet_all() {
    const Status status = meet(next_piece());
    if (status == Status::ok) finish();
    return status;
}

// A piece is whole rows where a slot holds one, else a part of a row.
Status Exchange::gather(const std::byte* x, int64_t stride, int64_t row_bytes, int64_t num_rows,
                        std::byte* out, bool to_first, Pool& pool) {
    const bool is_read = !to_first || rank_ == 0, is_written = !to_first || rank_ != 0;
    const int64_t width = std::min(row_bytes, slot_bytes_);
    const int64_t rows_each = width == 0 ? num_rows : std::max<int64_t>(1, slot_bytes_ / width);
    for (int64_t first = 0; first < num_rows; first += rows_each) {
        const int64_t rows = std::min(rows_each, num_rows - first);
        for (int64_t at = 0; at < row_bytes; at += width) {
            const auto part = static_cast<size_t>(std::min(width, row_bytes - at));
            const uint32_t piece = next_piece();
            const int64_t tile_rows = std::max<int64_t>(1, kTileBytes / width);
            const int64_t num_tiles = (rows + tile_rows - 1) / tile_rows;
            const auto each_row = [&](int64_t tile, const auto& copy) {
                const int64_t end = std::min(rows, (tile + 1) * tile_rows);
                for (int64_t row = tile * tile_rows; row < end; ++row) copy(row);
            };
            std::byte* own = slot(rank_, piece);
            parallel(pool, is_written ? num_tiles : 0, [&](int64_t tile, int) {
                each_row(tile, [&](int64_t row) {
                    std::memcpy(own + row * part, x + (first + row) * stride + at, part);
                });
            });
            if (const Status status = meet(piece); status != Status::ok) return status;
            parallel(pool, is_read ? num_tiles * size_ : 0, [&](int64_t number, int) {
                const auto rank = static_cast<int>(number % size_);
                const std::byte* from = slot(rank, piece);
                each_row(number / size_, [&](int64_t row) {
                    std::byte* to = out + ((first + row) * size_ + rank) * row_bytes + at;
                    const bool is_in_place = rank == rank_ && !is_written;
                    const std::byte* own_row = x + (first + row) * stride + at;
                    std::memcpy(to, is_in_place ? own_row : from + row * part, part);
                });
            });
        }
    }
    finish();
    return Status::ok;
}

Status Exchange::largest(const float* x, int64_t stride, int64_t count, float* out) {
    const int64_t each = slot_bytes_ / static_cast<int64_t>(sizeof(float));
    for (int64_t first = 0; first < count; first += each) {
        const int64_t end = std::min(count, first + each);
        const uint32_t piece = next_piece();
        auto* own = reinterpret_cast<float*>(slot(rank_, piece));
        for (int64_t i = first; i < end; ++i) own[i - first] = x[i * stride];
        if (const Status status = meet(piece); status != Status::ok) return status;
        std::memcpy(out + first, slot(0, piece), (end - first) * sizeof(float));
        for (int rank = 1; rank < size_; ++rank) {
            const auto* from = reinterpret_cast<const float*>(slot(rank, piece));
            for (int64_t i = first; i < end; ++i) {
                const float found = from[i - first];
                if (found > out[i] || found != found) out[i] = found;
            }
        }
    }
    finish();
    return Status::ok;
}

Status Exchange::broadcast(std::byte* data, int64_t num_bytes) {
    for (int64_t at = 0; at < num_bytes; at += slot_bytes_) {
        const auto part = static_cast<size_t>(std::min(slot_bytes_, num_bytes - at));
        const uint32_t piece = next_piece();
        if (rank_ == 0) std::memcpy(slot(0, piece), data + at, part);
        if (const Status status = meet(piece); status != Status::ok) return status;
        if (rank_ != 0) std::memcpy(data + at, slot(0, piece), part);
    }
    finish();
    return Status::ok;
}

}  // namespace quire
