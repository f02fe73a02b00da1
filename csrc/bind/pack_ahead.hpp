// Weights that are packed before anybody asks for them, as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

#include <algorithm>
#include <atomic>
#include <cassert>
#include <chrono>
#include <cstdint>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/level.hpp"
#include "core/library.hpp"
#include "core/memory.hpp"
#include "core/pool.hpp"
#include "kernels/tables.hpp"

#if defined(__linux__)
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace quire {

// A file that is mapped for reading. Where the system grants a lease, whoever would write to it or
// truncate it waits until this object is gone.
class MappedFile {
   public:
    // Leaves `data` null where the file cannot be mapped, or is empty.
    explicit MappedFile(const std::string& path) {
#if defined(__linux__)
        fd_ = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        struct stat about;
        if (fd_ < 0 || fstat(fd_, &about) != 0 || about.st_size <= 0) return;
        // before the size counts, and with a signal that is ignored unless somebody handles it
        is_leased_ = fcntl(fd_, F_SETSIG, SIGURG) == 0 && fcntl(fd_, F_SETLEASE, F_RDLCK) == 0;
        if (fstat(fd_, &about) != 0) return;
        void* mapping = mmap(nullptr, size_t(about.st_size), PROT_READ, MAP_PRIVATE, fd_, 0);
        if (mapping == MAP_FAILED) return;
        madvise(mapping, size_t(about.st_size), MADV_HUGEPAGE);  // as the page cache has them
        data_ = static_cast<std::byte*>(mapping);
        size_ = size_t(about.st_size);
#else
        (void)path;
#endif
    }
    ~MappedFile() {
#if defined(__linux__)
        if (data_ != nullptr) munmap(data_, size_);
        // a process that was forked meanwhile has the file open as well, which keeps the lease
        if (is_leased_) fcntl(fd_, F_SETLEASE, F_UNLCK);
        if (fd_ >= 0) close(fd_);
#endif
    }
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    std::byte* data() const { return data_; }
    size_t size() const { return size_; }
    bool is_leased() const { return is_leased_; }

    // Reads a byte of all that one fault maps, so that nobody waits for faults later. Until the time
    // is over: what is not in memory is read from the disk when it is needed.
    void touch(std::chrono::steady_clock::time_point end) const {
        constexpr size_t kPages = size_t(64) << 10;
        for (size_t at = 0; at < size_ && std::chrono::steady_clock::now() < end; at += kPages)
            static_cast<void>(*static_cast<const volatile std::byte*>(data_ + at));
    }

   private:
    int fd_ = -1;
    bool is_leased_ = false;
    std::byte* data_ = nullptr;
    size_t size_ = 0;
};

// What packs, and how.
struct Packer {
    Packer(int num_threads, const std::string& level)
        : kernels(kernels_for(find_level(level))), pool(num_threads) {}

    const Kernels kernels;
    Pool pool;
    std::atomic<int> num_waiting = 0;  // threads that wait for a block
};

// One piece of memory with the panels of some weights. Whoever packs it first claims it.
class PackedBlock {
   public:
    PackedBlock(size_t size, std::shared_ptr<Packer> packer)
        : size_(size), packer_(std::move(packer)) {}

    size_t size() const { return size_; }
    bool has_memory() const { return memory_ != nullptr; }
    bool is_waiting() const { return state_ == State::waiting; }
    bool is_packed() const { return state_ == State::packed; }
    std::shared_ptr<Memory> memory() const { return memory_; }

    // Before anybody else sees the block.
    void add(const PackedWeight& weight, size_t offset, const Outputs& outputs, size_t at,
             const std::shared_ptr<MappedFile>& file) {
        parts_.push_back({weight, offset, outputs, file->data() + at});
        sources_.push_back({outputs, file->data() + at});
        if (files_.empty() || files_.back() != file) files_.push_back(file);
        rows_ = {sources_.data(), int64_t(sources_.size()), 0, 0, 0};
    }

    // Throws std::bad_alloc. One thread at a time; pages that nobody has touched take no memory.
    void allocate() {
        if (memory_ == nullptr) memory_ = std::make_shared<Memory>(size_);
    }

    // Whether the caller is to pack it.
    bool claim() {
        int waiting = State::waiting;
        return state_.compare_exchange_strong(waiting, State::begun);
    }

    // By the one who has claimed it, a piece after the other, each after `give_way()`.
    template <class GiveWay>
    void pack(const GiveWay& give_way) {
        {
            Pool::Lease lease(packer_->pool);
            for (const Part& part : parts_) pack_part(part, give_way);
        }
        __atomic_store_n(&rows_.is_packed, 1, __ATOMIC_SEQ_CST);
        state_ = State::packed;
        state_.notify_all();
    }

    // By the one who has claimed it, where there is no memory for it.
    void fail() {
        state_ = State::failed;
        state_.notify_all();
    }

    // Until it is packed, by the caller where nobody else does.
    void wait() {
        ++packer_->num_waiting;
        if (has_memory() && claim()) pack([] {});
        state_.wait(State::begun);
        --packer_->num_waiting;
    }

    // Of its one weight, for products meanwhile; valid as long as the block.
    const UnpackedRows* rows() const { return &rows_; }

    // Products, so far, that have read the files.
    uint32_t num_reads() const { return __atomic_load_n(&rows_.reads, __ATOMIC_RELAXED); }

    // Waits for whoever packs it, and for products that read the files, and lets these go; nothing
    // where it is not packed.
    void release_files() {
        state_.wait(State::begun);
        if (!is_packed()) return;
        while (__atomic_load_n(&rows_.readers, __ATOMIC_SEQ_CST) != 0)
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        files_.clear();
    }

   private:
    enum State : int { waiting, begun, packed, failed };

    struct Part {
        PackedWeight weight;
        size_t offset;
        Outputs outputs;
        std::byte* source;
    };

    template <class GiveWay>
    void pack_part(const Part& part, const GiveWay& give_way) const {
        constexpr int64_t kBytes = 4 << 20;
        const int64_t row = part.weight.in * size_of(part.weight.type);
        const int64_t most = (kBytes / row / kPanelWidth + 1) * kPanelWidth;
        for (int64_t done = 0, count; done < part.outputs.count; done += count) {
            give_way();
            count = std::min(most, part.outputs.count - done);
            const Rows from{part.source + done * row, part.weight.in, 0};
            const PackArgs args{part.weight,
                                from,
                                memory_->data() + part.offset,
                                {part.outputs.first + done, count},
                                nullptr};
            packer_->kernels.pack(args, part.weight.out, packer_->pool);
        }
    }

    const size_t size_;
    const std::shared_ptr<Packer> packer_;
    std::vector<Part> parts_;
    std::vector<SourceRows> sources_;
    std::vector<std::shared_ptr<MappedFile>> files_;
    UnpackedRows rows_{};
    std::shared_ptr<Memory> memory_;
    std::atomic<int> state_ = State::waiting;
};

// Packs blocks of weights out of mapped files, in their order, in threads of its own, which need
// neither Python nor its lock.
//
// Whoever takes a block may use its weight at once, from the files' rows until it is packed, and
// the threads go on until all blocks that were taken are. Where nothing keeps others from changing
// the files meanwhile, or there are too many bytes for that, taking a block that is being packed
// waits, and taking one that has not been begun ends the packing: the taker has caught up, and
// packs from then on with all threads, into memory that a thread touches meanwhile.
class PackAhead {
   public:
    PackAhead(int num_threads, const std::string& level)
        : packer_(std::make_shared<Packer>(num_threads, level)) {}

    ~PackAhead() { stop(); }

    // The number of the file, or -1 where it cannot be mapped.
    int64_t add_file(const std::string& path) {
        auto file = std::make_shared<MappedFile>(path);
        if (file->data() == nullptr) return -1;
        is_unchanging_ &= file->is_leased();
        files_.push_back(std::move(file));
        return int64_t(files_.size()) - 1;
    }

    int64_t add_block(size_t size) {
        blocks_.push_back(std::make_shared<PackedBlock>(size, packer_));
        size_ += size;
        return int64_t(blocks_.size()) - 1;
    }

    // Outputs first..first+count-1 of a weight, whose panels are `offset` bytes into the block, out
    // of [count, in] at `at` of a file. False where the file is shorter than that.
    bool add_rows(int64_t block, const PackedWeight& weight, size_t offset, int64_t first,
                  int64_t count, int64_t file, size_t at) {
        const std::shared_ptr<MappedFile>& from = files_.at(size_t(file));
        const auto element = static_cast<size_t>(size_of(weight.type));
        const size_t bytes = size_t(count) * size_t(weight.in) * element;
        if (at % element != 0 || at > from->size() || bytes > from->size() - at) return false;
        blocks_.at(size_t(block))->add(weight, offset, {first, count}, at, from);
        return true;
    }

    void start() {
        has_ended_ = false;
        thread_ = std::thread([this] { run(); });
    }

    // A block, once; null where it has not been packed, and will not be.
    std::shared_ptr<PackedBlock> take(int64_t number) {
        std::unique_lock lock(mutex_);
        assert(!is_taken_);
        const std::shared_ptr<PackedBlock> block = blocks_.at(size_t(number));
        if (!is_stopped_ && goes_on_after_taking()) {
            try {
                block->allocate();
                return block;
            } catch (const std::bad_alloc&) {
                return nullptr;
            }
        }
        if (!block->is_packed() && !is_stopped_) {
            is_stopped_ = true;
            prepare_memory(size_to_come());
        }
        lock.unlock();
        if (block->is_waiting() && block->claim()) block->fail();
        block->wait();
        return block->is_packed() ? block : nullptr;
    }

    // Waits until all blocks are packed, while they may still be taken.
    void wait() {
        for (size_t i = 0; i < blocks_.size(); ++i) {
            pack(i);
            blocks_[i]->wait();
        }
    }

    // Nobody takes blocks from now on: those that nobody has are not packed.
    void end_taking() {
        std::lock_guard lock(mutex_);
        is_taken_ = true;
        if (has_ended_) blocks_.clear();  // who has taken one keeps it
    }

    // Whether all that was taken is packed, or never will be.
    bool has_ended() const { return has_ended_; }

    // Returns then; nobody hurries.
    void wait_for_end() const { has_ended_.wait(false); }

    void stop() {
        {
            std::lock_guard lock(mutex_);
            is_stopped_ = is_ending_ = true;
        }
        if (thread_.joinable()) thread_.join();
    }

   private:
    // A lease holds up others for 45 seconds at most.
    static constexpr size_t kMostBytes = size_t(32) << 30;

    bool goes_on_after_taking() const { return is_unchanging_ && size_ <= kMostBytes; }

    void run() {
        const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
        for (const std::shared_ptr<MappedFile>& file : files_) file->touch(end);
        files_.clear();  // which blocks keep
        wait_for_libraries();  // who imports waits for those, and for packed weights later
        for (size_t i = 0; i < blocks_.size(); ++i) pack(i);
        // here, as it takes time; nothing else reads the files of what is packed
        for (const std::shared_ptr<PackedBlock>& block : blocks_)
            if (block != nullptr) block->release_files();
        std::lock_guard lock(mutex_);
        has_ended_ = true;
        has_ended_.notify_all();
        if (is_taken_) blocks_.clear();
    }

    void pack(size_t number) {
        const std::shared_ptr<PackedBlock> block = next(number);
        if (block == nullptr || !block->claim()) return;
        if (block->has_memory())
            block->pack([this] { give_way(); });
        else
            block->fail();
    }

    // Waits while products read the files: where there are as many threads as cores, each region
    // of a step would wait for the one whose core this thread is on. For so long altogether that a
    // few first steps go by.
    void give_way() {
        using std::chrono::milliseconds;
        constexpr milliseconds kPause(10), kNap(1);
        while (patience_ > kNap && !is_ending_ && packer_->num_waiting == 0) {
            const auto now = std::chrono::steady_clock::now();
            uint32_t reads = 0;
            for (const std::shared_ptr<PackedBlock>& block : blocks_)
                if (block != nullptr) reads += block->num_reads();
            if (reads != std::exchange(reads_, reads)) read_at_ = now;
            if (now - read_at_ > kPause) return;
            std::this_thread::sleep_for(kNap);
            patience_ -= std::chrono::steady_clock::now() - now;
        }
    }

    // Block `number` with its memory; null where nobody wants it.
    std::shared_ptr<PackedBlock> next(size_t number) {
        std::lock_guard lock(mutex_);
        std::shared_ptr<PackedBlock>& block = blocks_[number];
        if (is_stopped_) return nullptr;
        if (is_taken_ && block.use_count() == 1) {
            block = nullptr;
            return nullptr;
        }
        try {
            block->allocate();
        } catch (const std::bad_alloc&) {  // fails
        }
        return block;
    }

    // Of the blocks that will not be packed here, on huge pages.
    size_t size_to_come() const {
        constexpr size_t kPage = size_t(2) << 20;
        size_t size = 0;
        for (const std::shared_ptr<PackedBlock>& block : blocks_)
            if (block->is_waiting() && block->size() >= kPage)
                size += (block->size() + kPage - 1) / kPage * kPage;
        return size;
    }

    const std::shared_ptr<Packer> packer_;
    std::vector<std::shared_ptr<MappedFile>> files_;
    std::vector<std::shared_ptr<PackedBlock>> blocks_;  // complete before the thread starts
    size_t size_ = 0;
    bool is_unchanging_ = true;
    std::mutex mutex_;
    bool is_stopped_ = false, is_taken_ = false;
    std::atomic<bool> is_ending_ = false, has_ended_ = true;
    // Of the thread: how long it still gives way, the reads it has seen, and when they grew.
    std::chrono::steady_clock::duration patience_ = std::chrono::milliseconds(1500);
    uint32_t reads_ = 0;
    std::chrono::steady_clock::time_point read_at_{};
    std::thread thread_;
};

}  // namespace quire
