// Weights that are packed before anybody asks for them, as Python sees them.
#pragma once

#include <nanobind/nanobind.h>

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "core/level.hpp"
#include "core/library.hpp"
#include "core/memory.hpp"
#include "core/pool.hpp"
#include "kernels/tables.hpp"

#if defined(__linux__)
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#endif

namespace quire {

// A file that is mapped for reading.
class MappedFile {
   public:
    // Leaves `data` null where the file cannot be mapped.
    explicit MappedFile(const std::string& path) {
#if defined(__linux__)
        const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
        if (fd < 0) return;
        struct stat about;
        if (fstat(fd, &about) == 0 && about.st_size > 0) {
            void* mapping = mmap(nullptr, size_t(about.st_size), PROT_READ, MAP_PRIVATE, fd, 0);
            if (mapping != MAP_FAILED) {
                data_ = static_cast<std::byte*>(mapping);
                size_ = size_t(about.st_size);
            }
        }
        close(fd);
#else
        (void)path;
#endif
    }
    ~MappedFile() {
#if defined(__linux__)
        if (data_ != nullptr) munmap(data_, size_);
#endif
    }
    MappedFile(const MappedFile&) = delete;
    MappedFile& operator=(const MappedFile&) = delete;

    std::byte* data() const { return data_; }
    size_t size() const { return size_; }

   private:
    std::byte* data_ = nullptr;
    size_t size_ = 0;
};

// Packs blocks of weights out of mapped files, in their order, in threads of its own, which need
// neither Python nor its lock. A block is one piece of memory with the panels of some weights.
//
// Whoever asks for a block that is being packed waits for it. Asking for one that has not been
// packed ends the packing: the asker has caught up, and packs from then on with all threads, into
// memory that a thread touches meanwhile.
class PackAhead {
   public:
    PackAhead(int num_threads, const std::string& level)
        : kernels_(kernels_for(find_level(level))), pool_(num_threads) {}

    ~PackAhead() { stop(); }

    // The number of the file, or -1 where it cannot be mapped.
    int64_t add_file(const std::string& path) {
        auto file = std::make_unique<MappedFile>(path);
        if (file->data() == nullptr) return -1;
        files_.push_back(std::move(file));
        return int64_t(files_.size()) - 1;
    }

    int64_t add_block(size_t size) {
        blocks_.emplace_back();
        blocks_.back().size = size;
        return int64_t(blocks_.size()) - 1;
    }

    // Outputs first..first+count-1 of a weight, whose panels are `offset` bytes into the block, out
    // of [count, in] at `at` of a file. False where the file is shorter than that.
    bool add_rows(int64_t block, const PackedWeight& weight, size_t offset, int64_t first,
                  int64_t count, int64_t file, size_t at) {
        const MappedFile& from = *files_.at(size_t(file));
        const auto element = static_cast<size_t>(size_of(weight.type));
        const size_t bytes = size_t(count) * size_t(weight.in) * element;
        if (at % element != 0 || at > from.size() || bytes > from.size() - at) return false;
        blocks_.at(size_t(block)).rows.push_back(
            {weight, offset, {first, count}, from.data() + at});
        return true;
    }

    void start() {
        thread_ = std::thread([this] { run(); });
    }

    // The memory of a block, once; null where it has not been packed.
    std::shared_ptr<Memory> take(int64_t number) {
        std::unique_lock lock(mutex_);
        Block& block = blocks_.at(size_t(number));
        if (block.state != State::ended && !is_stopped_) {
            is_stopped_ = true;
            prepare_memory(size_to_come());
        }
        packed_.wait(lock, [&] { return block.state != State::begun; });
        return std::move(block.memory);
    }

    // Waits until all blocks are packed.
    void wait() {
        std::unique_lock lock(mutex_);
        packed_.wait(lock, [&] {
            return is_stopped_ || blocks_.empty() || blocks_.back().state == State::ended;
        });
    }

    void stop() {
        {
            std::lock_guard lock(mutex_);
            is_stopped_ = true;
        }
        if (thread_.joinable()) thread_.join();
    }

   private:
    enum class State { waiting, begun, ended };

    struct PackedRows {
        PackedWeight weight;
        size_t offset;
        Outputs outputs;
        std::byte* source;
    };

    struct Block {
        size_t size = 0;
        std::vector<PackedRows> rows;
        State state = State::waiting;
        std::shared_ptr<Memory> memory;
    };

    void run() {
        wait_for_libraries();  // who imports waits for those, and for packed weights later
        pack_blocks();
        files_.clear();  // here, as it takes time; nothing else reads them
    }

    void pack_blocks() {
        for (Block& block : blocks_) {
            {
                std::lock_guard lock(mutex_);
                if (is_stopped_) return;
                block.state = State::begun;
            }
            std::shared_ptr<Memory> memory = packed(block);
            std::lock_guard lock(mutex_);
            block.memory = std::move(memory);
            block.state = State::ended;
            packed_.notify_all();
        }
    }

    // Of the blocks that will not be packed here, on huge pages.
    size_t size_to_come() const {
        constexpr size_t kPage = size_t(2) << 20;
        size_t size = 0;
        for (const Block& block : blocks_)
            if (block.state == State::waiting && block.size >= kPage)
                size += (block.size + kPage - 1) / kPage * kPage;
        return size;
    }

    std::shared_ptr<Memory> packed(const Block& block) {
        std::shared_ptr<Memory> memory;
        try {
            memory = std::make_shared<Memory>(block.size);
        } catch (const std::bad_alloc&) {
            return nullptr;
        }
        Pool::Lease lease(pool_);
        for (const PackedRows& part : block.rows) {
            const Rows from{part.source, part.weight.in, 0};
            const PackArgs args{part.weight, from, memory->data() + part.offset, part.outputs};
            kernels_.pack(args, part.weight.out, pool_);
        }
        return memory;
    }

    const Kernels kernels_;
    Pool pool_;
    std::vector<std::unique_ptr<MappedFile>> files_;
    std::vector<Block> blocks_;  // complete before the thread starts
    std::mutex mutex_;
    std::condition_variable packed_;
    bool is_stopped_ = false;
    std::thread thread_;
};

}  // namespace quire
