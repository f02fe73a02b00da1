// Shared libraries that are loaded before they are asked for.
#pragma once

#include <string>
#include <vector>

namespace quire {

// Has a thread load shared libraries, in this order, so that whoever asks for one of them later
// finds it loaded. The first one that does not load ends it: who asks for that one learns why.
// Returns at once. Does nothing after the first call.
void load_ahead(std::vector<std::string> paths);

// Waits for that thread, if there is one.
void wait_for_libraries();

}  // namespace quire
