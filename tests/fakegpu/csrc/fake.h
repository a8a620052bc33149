// What the four libraries share: the log, and how a stream is named.
#ifndef FAKE_H
#define FAKE_H
#include <stddef.h>

// Appends "<thread> <text>" as a line to the file $FAKEGPU_LOG; libcudart has it.
void fakegpu_log(const char *format, ...) __attribute__((weak, format(printf, 1, 2)));
#define LOG(...) do { if (fakegpu_log) fakegpu_log(__VA_ARGS__); } while (0)

// A stream is FIRST_STREAM + 16 * number. CUDA's own handles 0, 1 and 2 are the default stream, 0.
#define FIRST_STREAM 0x1000
static inline int number_of(const void *stream) {
    size_t value = (size_t)stream;
    return value < FIRST_STREAM ? 0 : (int)((value - FIRST_STREAM) / 16);
}
#endif
