"""One engine core without sockets: schedule, execute, update; and the builder that assembles it."""
