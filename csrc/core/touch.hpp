// Memory that is touched before it is needed.
#pragma once

#include <cstddef>
#include <memory>

#include "core/memory.hpp"

namespace quire {

// Has a thread, which sleeps most of the time, give pages to the memory, whose contents stay: who
// writes there later waits for none of them. Returns at once. Does nothing where the system cannot.
void touch_ahead(std::byte* memory, size_t size);

// Has a thread touch the first page of the memory, a huge one where it has those; the contents stay,
// and the thread keeps the memory until then. Further calls wait for their turn in the same thread.
void touch_start(std::shared_ptr<Memory> memory);

}  // namespace quire
