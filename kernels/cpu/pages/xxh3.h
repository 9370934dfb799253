// XXH3 with 128 bits (format of xxHash 0.8, seed 0) over bytes that are copied at the same time.
//
// Each byte of the source is loaded once, into a register that is both stored and added to the tag. So the tag is that
// of the bytes in the destination, even if another process writes to the source meanwhile. Reading the destination
// again would halve the rate.
#pragma once

#include <algorithm>

#include "native/common.h"

namespace quire::xxh3 {

constexpr int64_t STRIPE = 64, STRIPES = 16, BLOCK = STRIPE * STRIPES;  // a block of stripes ends with a scramble
constexpr int64_t PREFETCH = 4096;

constexpr uint64_t P32_1 = 0x9E3779B1u, P32_2 = 0x85EBCA77u, P32_3 = 0xC2B2AE3Du;
constexpr uint64_t P64_1 = 0x9E3779B185EBCA87u, P64_2 = 0xC2B2AE3D27D4EB4Fu, P64_3 = 0x165667B19E3779F9u;
constexpr uint64_t P64_4 = 0x85EBCA77C2B2AE63u, P64_5 = 0x27D4EB2F165667C5u;

alignas(64) constexpr uint8_t SECRET[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e};

#if defined(__AVX512F__)
typedef __m512i Lanes;
QUIRE_INLINE Lanes product(Lanes x) { return _mm512_mul_epu32(x, _mm512_srli_epi64(x, 32)); }
QUIRE_INLINE void stream(char* to, Lanes x) { _mm512_stream_si512(reinterpret_cast<Lanes*>(to), x); }
#define QUIRE_REGISTER "+v"
#elif defined(__AVX2__)
typedef __m256i Lanes;
QUIRE_INLINE Lanes product(Lanes x) { return _mm256_mul_epu32(x, _mm256_srli_epi64(x, 32)); }
QUIRE_INLINE void stream(char* to, Lanes x) { _mm256_stream_si256(reinterpret_cast<Lanes*>(to), x); }
#define QUIRE_REGISTER "+x"
#else
typedef uint64_t Lanes __attribute__((vector_size(16)));
QUIRE_INLINE Lanes product(Lanes x) { return (x & 0xffffffffu) * (x >> 32); }
QUIRE_INLINE void stream(char* to, Lanes x) { store(to, x); }
#if defined(__aarch64__)
#define QUIRE_REGISTER "+w"
#else
#define QUIRE_REGISTER "+m"
#endif
#endif
constexpr int WIDTH = sizeof(Lanes), PARTS = STRIPE / WIDTH;

// Makes what was streamed visible before what is stored next.
QUIRE_INLINE void fence() {
#if defined(__AVX2__)
    _mm_sfence();
#endif
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

QUIRE_INLINE uint64_t word(const void* from) { return load<uint64_t>(static_cast<const char*>(from)); }

// The tag of bytes that arrive in order. The lanes of an open block are sums of products and of plain words; the state
// changes only at the end of a block, so that blocks do not wait for each other. If not `Summed`, only copies.
template <bool Summed = true>
class Tag {
  public:
    // Copies `bytes`, a multiple of STRIPE, and adds them. `next`: what is read after them. `Streamed`: `to` is aligned
    // to WIDTH.
    template <bool Streamed>
    void copy(char* to, const char* from, int64_t bytes, const char* next) {
        total_ += bytes;
        Lanes products[PARTS], plain[PARTS];
        std::memcpy(products, products_, STRIPE), std::memcpy(plain, plain_, STRIPE);
        const int64_t ahead = std::min(PREFETCH, bytes);
        for (int64_t at = 0; at < bytes;) {
            const char* soon = at + ahead < bytes ? from + at + ahead : next + (at + ahead - bytes);
            if (stripe_ == 0 && bytes - at >= BLOCK) {
#pragma GCC unroll 16
                for (int i = 0; i < STRIPES; i++)
                    add<Streamed>(products, plain, to + at + i * STRIPE, from + at + i * STRIPE, soon + i * STRIPE, i);
                at += BLOCK;
            } else {
                add<Streamed>(products, plain, to + at, from + at, soon, stripe_);
                at += STRIPE;
                if (++stripe_ < STRIPES) continue;
            }
            close(products, plain);
            if (Summed) scramble();
        }
        std::memcpy(products_, products, STRIPE), std::memcpy(plain_, plain, STRIPE);
    }

    // Adds the last bytes, more than STRIPE and at most LAST, and returns the tag. In all at least 241 bytes were added.
    static constexpr int64_t LAST = 512;
    void finish(const char* last, int64_t bytes, uint8_t tag[16]) {
        char copied[LAST];
        const int64_t whole = (bytes - 1) / STRIPE * STRIPE;
        copy<false>(copied, last, whole, last);
        const uint64_t length = uint64_t(total_ + bytes - whole);
        close(products_, plain_);
        const char* end = last + bytes - STRIPE;
        for (int i = 0; i < 8; i++) {
            const uint64_t data = word(end + 8 * i), key = data ^ word(SECRET + 121 + 8 * i);
            state_[i ^ 1] += data;
            state_[i] += (key & 0xffffffffu) * (key >> 32);
        }
        const uint64_t halves[2] = {merge(11, length * P64_1), merge(117, ~(length * P64_2))};
        std::memcpy(tag, halves, 16);
    }

  private:
    typedef uint64_t Words __attribute__((vector_size(sizeof(Lanes))));

    template <bool Streamed>
    QUIRE_INLINE static void add(Lanes* products, Lanes* plain, char* to, const char* from, const char* soon, int stripe) {
#pragma GCC unroll 4
        for (int part = 0; part < PARTS; part++) {
            __builtin_prefetch(soon + part * WIDTH);
            Lanes data = load<Lanes>(from + part * WIDTH);
            asm("" : QUIRE_REGISTER(data));  // loaded once: the compiler must not read it again
            if (Streamed)
                stream(to + part * WIDTH, data);
            else
                store(to + part * WIDTH, data);
            if (!Summed) continue;
            const Lanes keyed = data ^ load<Lanes>(SECRET + 8 * stripe + part * WIDTH);
            products[part] = Lanes(Words(products[part]) + Words(product(keyed)));
            plain[part] = Lanes(Words(plain[part]) + Words(data));
        }
    }

    // Adds an open block's sums to the state, and clears them. A plain word counts for the lane beside its own.
    void close(Lanes* products, Lanes* plain) {
        stripe_ = 0;
        if (!Summed) return;
        uint64_t sums[8], words[8];
        std::memcpy(sums, products, STRIPE), std::memcpy(words, plain, STRIPE);
        for (int i = 0; i < 8; i++) state_[i] += sums[i] + words[i ^ 1];
        std::memset(products, 0, STRIPE), std::memset(plain, 0, STRIPE);
    }

    void scramble() {
        for (int i = 0; i < 8; i++) state_[i] = (state_[i] ^ state_[i] >> 47 ^ word(SECRET + 128 + 8 * i)) * P32_1;
    }

    uint64_t merge(int secret, uint64_t sum) const {
        for (int i = 0; i < 8; i += 2) {
            const auto wide = (unsigned __int128)(state_[i] ^ word(SECRET + secret + 8 * i)) *
                              (state_[i + 1] ^ word(SECRET + secret + 8 * i + 8));
            sum += uint64_t(wide) ^ uint64_t(wide >> 64);
        }
        sum = (sum ^ sum >> 37) * 0x165667919E3779F9u;
        return sum ^ sum >> 32;
    }

    Lanes products_[PARTS] = {}, plain_[PARTS] = {};
    uint64_t state_[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    int64_t total_ = 0;
    int stripe_ = 0;
};

}  // namespace quire::xxh3
