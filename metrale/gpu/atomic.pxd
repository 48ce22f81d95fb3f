# SPDX-License-Identifier: MIT OR Apache-2.0
# What threads share without the GIL: counters, and a text whose address says that what was written before can be read.

cdef extern from *:
    """
    static inline int metrale_add(int* counter, int n) { return __atomic_add_fetch(counter, n, __ATOMIC_SEQ_CST); }
    static inline int metrale_read(int* counter) { return __atomic_load_n(counter, __ATOMIC_SEQ_CST); }
    static inline void metrale_write(int* counter, int n) { __atomic_store_n(counter, n, __ATOMIC_SEQ_CST); }
    static inline void metrale_publish(const char** at, const char* text) {
        __atomic_store_n(at, text, __ATOMIC_RELEASE);
    }
    static inline const char* metrale_published(const char** at) { return __atomic_load_n(at, __ATOMIC_ACQUIRE); }
    """
    int atomic_add "metrale_add"(int* counter, int n) noexcept nogil
    int atomic_read "metrale_read"(int* counter) noexcept nogil
    void atomic_write "metrale_write"(int* counter, int n) noexcept nogil
    void publish "metrale_publish"(const char** at, const char* text) noexcept nogil
    const char* published "metrale_published"(const char** at) noexcept nogil
