# SPDX-License-Identifier: MIT OR Apache-2.0
# Counters that threads share without the GIL.

cdef extern from *:
    """
    static inline int metrale_add(int* counter, int n) { return __atomic_add_fetch(counter, n, __ATOMIC_SEQ_CST); }
    static inline int metrale_read(int* counter) { return __atomic_load_n(counter, __ATOMIC_SEQ_CST); }
    static inline void metrale_write(int* counter, int n) { __atomic_store_n(counter, n, __ATOMIC_SEQ_CST); }
    """
    int atomic_add "metrale_add"(int* counter, int n) noexcept nogil
    int atomic_read "metrale_read"(int* counter) noexcept nogil
    void atomic_write "metrale_write"(int* counter, int n) noexcept nogil
