// Memory that is touched before it is needed.
#pragma once

#include <cstddef>

namespace quire {

// Has a thread, which sleeps most of the time, give pages to the memory, whose contents stay: who
// writes there later waits for none of them. Returns at once. Does nothing where the system cannot.
void touch_ahead(std::byte* memory, size_t size);

}  // namespace quire
