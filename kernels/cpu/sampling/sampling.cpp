// Samples one token per row of logits, as kernels/sampling/sampling.py defines it: integer masses, so that sums are exact
// in any order; best first with top-k or top-p. No row is sorted: the token is selected among the few candidates that
// can be drawn. A row's token depends on that row alone.

#include <cmath>

#include "native/common.h"
#include "native/exp.h"
#include "native/pool.h"
#include "sampling/row_scan.h"

using namespace quire;

namespace {

// In logits: with fewer, waking other threads costs more than it saves.
constexpr long SAMPLE_THREADS_FROM = 1 << 15;
constexpr long CHUNK = 1024;  // tokens per sum of masses, so that each lane fits in 32 bits
constexpr int64_t WHOLE_PART = int64_t(1) << 20;
constexpr float NO_MASS_BELOW = -29.f;  // e^-29 is less than 2^-40

// floor(e^scaled * 2^40), in two halves that fit 32 bits: high * 2^20 + low. scaled is at most 0.
QUIRE_INLINE void add_masses(vfloat scaled, vint& high, vint& low) {
    const vfloat least = splat(-40.f);
    scaled = scaled < least ? least : scaled;
    vfloat n;
    const vfloat p = exp_parts(scaled, n);
    const vfloat weight = p * (vfloat)((__builtin_convertvector(n, vint) + (127 + 40)) << 23);
    const vint whole = __builtin_convertvector(weight * 0x1p-20f, vint);
    high += whole;
    low += __builtin_convertvector(multiply_add(__builtin_convertvector(whole, vfloat), splat(-0x1p20f), weight), vint);
}

QUIRE_INLINE int64_t total(vint high, vint low) {
    int64_t sum = 0;
    for (int i = 0; i < VF; i++) sum += high[i] * WHOLE_PART + low[i];
    return sum;
}

// Sampling parameters of a row.
struct Wanted {
    float temperature, top_p, log_min_p;
    long top_k;
    double noise;
};

struct Candidate {
    uint64_t key;  // bits of -scaled, then the token: ascending order is best first, of equal ones the lower token
    int64_t mass;

    float scaled() const {
        const uint32_t bits = uint32_t(key >> 32);
        float magnitude;
        std::memcpy(&magnitude, &bits, 4);
        return -magnitude;
    }
    bool operator<(const Candidate& other) const { return key < other.key; }
};

// Scratch memory of one thread, reused for every row.
class RowSampler {
  public:
    long sample(const float* row, long vocab, const Wanted& wanted, bool& bad) {
        scan_.read(row, vocab);
        bad = !scan_.usable();
        if (bad || !(wanted.temperature > 0.f)) return scan_.best_token();
        row_ = row, vocab_ = vocab, temperature_ = wanted.temperature, floor_ = wanted.log_min_p;
        return wanted.top_k > 0 || wanted.top_p < 1.f ? draw_best_first(wanted) : draw_in_order(wanted);
    }

  private:
    QUIRE_INLINE vfloat scaled_at(long i, long end) const {
        return (load_logits(row_ + i, end - i) - scan_.best) / temperature_;
    }

    // Tokens below min-p's floor have no mass.
    QUIRE_INLINE vfloat above_floor(vfloat scaled) const { return scaled >= floor_ ? scaled : splat(NO_LOGIT); }

    // Sums the masses, one sum per chunk; returns their total.
    int64_t sum_chunks() {
        sums_.clear();
        int64_t all = 0;
        for (long start = 0; start < vocab_; start += CHUNK) {
            const long end = std::min(start + CHUNK, vocab_);
            vint high{}, low{};
            for (long i = start; i < end; i += VF) {
                add_masses(above_floor(scaled_at(i, end)), high, low);
            }
            sums_.push_back(total(high, low));
            all += sums_.back();
        }
        return all;
    }

    // The first token, in the vocabulary's order, at which the cumulative mass exceeds the target.
    long draw_in_order(const Wanted& wanted) {
        const int64_t all = sum_chunks();
        int64_t left = unit(wanted.noise, all);
        long chunk = 0;
        while (left >= sums_[size_t(chunk)]) left -= sums_[size_t(chunk++)];
        const long end = std::min((chunk + 1) * CHUNK, vocab_);
        for (long i = chunk * CHUNK; i < end; i += VF) {
            vint high{}, low{};
            add_masses(above_floor(scaled_at(i, end)), high, low);
            for (int lane = 0; lane < VF; lane++) {
                left -= high[lane] * WHOLE_PART + low[lane];
                if (left < 0) return i + lane;
            }
        }
        return vocab_ - 1;  // unreachable: the chunk's sum is the sum of these masses
    }

    long draw_best_first(const Wanted& wanted) {
        const bool counted = wanted.top_k > 0 && wanted.top_k < vocab_;
        int64_t kept = counted ? keep_best(wanted.top_k) : sum_chunks();
        int64_t last = kept - 1;
        if (wanted.top_p < 1.f) {
            // Tokens with less mass than the limit before them are kept: the last one contains unit ceil(limit) - 1.
            const double limit = double(wanted.top_p) * double(kept);
            last = std::min(std::max(int64_t(std::ceil(limit)) - 1, int64_t(0)), last);
        }
        if (!counted) gather_until([&](int64_t mass) { return mass > last; });
        if (wanted.top_p < 1.f) kept = keep_through(last);
        return long(uint32_t(found_[holder_of(unit(wanted.noise, kept)).index].key));
    }

    static int64_t unit(double noise, int64_t mass) {
        return std::max(std::min(int64_t(noise * double(mass)), mass - 1), int64_t(0));
    }

    // Sets found_ to the k best tokens with nonzero mass. Returns their mass.
    int64_t keep_best(long k) {
        const float reached = (scan_.reached_by(k) - scan_.best) / temperature_;
        if (reached >= NO_MASS_BELOW)
            gather(reached);
        else
            gather_until([&](int64_t) { return long(found_.size()) >= k; });
        if (long(found_.size()) > k) {
            std::nth_element(found_.begin(), found_.begin() + k, found_.end());
            found_.resize(size_t(k));
        }
        int64_t sum = 0;
        for (const Candidate& one : found_) sum += one.mass;
        return sum;
    }

    // Sets found_ to a prefix of the order for which `enough(its mass)` is true, or to all tokens with nonzero mass.
    // Usually few tokens have nearly all the mass.
    template <class Enough>
    void gather_until(Enough&& enough) {
        int64_t sum = 0;
        float before = std::numeric_limits<float>::infinity();
        found_.clear();
        for (float least : {-3.f, -6.f, -9.f, -12.f, -16.f, NO_MASS_BELOW}) {
            sum += add_between(least, before);
            if (enough(sum)) return;
            before = least;
        }
    }

    // Sets found_ to all tokens whose scaled logit is at least `least`.
    void gather(float least) {
        found_.clear();
        add_between(least, std::numeric_limits<float>::infinity());
    }

    // Appends to found_ the tokens whose scaled logit is at least `least` and below `before`. Returns their mass.
    int64_t add_between(float least, float before) {
        const size_t old = found_.size();
        // A slightly lower bound, because of rounding; the exact comparison below drops tokens under the real bound.
        const float bound = scan_.best + least * temperature_ * 1.00001f;
        scan_.for_each_from(bound, [&](long token) {
            const float scaled = (row_[token] - scan_.best) / temperature_;
            if (!(scaled >= least && scaled < before)) return false;
            const float magnitude = std::fabs(scaled);
            uint32_t bits;
            std::memcpy(&bits, &magnitude, 4);
            found_.push_back({uint64_t(bits) << 32 | uint64_t(token), 0});
            return false;
        });
        int64_t sum = 0;
        for (size_t i = old; i < found_.size(); i += VF) {
            const size_t count = std::min(found_.size() - i, size_t(VF));
            float lanes[VF];
            for (size_t lane = 0; lane < VF; lane++) lanes[lane] = lane < count ? found_[i + lane].scaled() : NO_LOGIT;
            vint high{}, low{};
            add_masses(above_floor(load<vfloat>(lanes)), high, low);
            for (size_t lane = 0; lane < count; lane++)
                sum += found_[i + lane].mass = high[int(lane)] * WHOLE_PART + low[int(lane)];
        }
        return sum;
    }

    // Cuts found_ after the token that contains unit `last`. Returns the mass.
    int64_t keep_through(int64_t last) {
        const Holder holder = holder_of(last);
        found_.resize(holder.index + 1);
        return holder.before + found_.back().mass;
    }

    struct Holder {
        size_t index;
        int64_t before;  // mass of the candidates before it
    };

    // The candidate that contains unit `unit` of the mass, best first. Partitions found_: better candidates before it.
    Holder holder_of(int64_t unit) {
        constexpr size_t FEW = 48;
        size_t first = 0, end = found_.size();
        int64_t before = 0;
        while (end - first > FEW) {
            const size_t middle = first + (end - first) / 2;
            std::nth_element(at(first), at(middle), at(end));
            int64_t left = 0;
            for (size_t i = first; i < middle; i++) left += found_[i].mass;
            if (unit < before + left)
                end = middle;
            else
                before += left, first = middle;
        }
        std::sort(at(first), at(end));
        while (first + 1 < end && unit >= before + found_[first].mass) before += found_[first++].mass;
        return {first, before};
    }

    std::vector<Candidate>::iterator at(size_t index) { return found_.begin() + std::ptrdiff_t(index); }

    RowScan scan_;
    const float* row_;
    long vocab_;
    float temperature_, floor_;
    std::vector<int64_t> sums_;
    std::vector<Candidate> found_;
};

// Two rounds of SplitMix64's finaliser, as kernels/sampling/sampling_noise.py.
uint64_t mix(uint64_t z) {
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9u;
    z = (z ^ z >> 27) * 0x94D049BB133111EBu;
    return z ^ z >> 31;
}

double uniform(uint64_t seed, uint64_t position) {
    return double(mix(mix(seed + 0x9E3779B97F4A7C15u * (position + 1)) ^ seed) >> 11) * 0x1p-53;
}

}  // namespace

struct SampleCall {
    // Columns of the batch, indexed by row.
    const uint64_t* seed;
    const int32_t* num_known;
    const float* temperature;
    const int32_t* top_k;
    const float *top_p, *min_p;
    // Per sampled position.
    const float* logits;
    long logits_stride;
    const int64_t *rows, *offsets;
    int64_t* tokens;
    uint8_t* bad;
    long num_positions, vocab;
};

QUIRE_API void quire_sample(const SampleCall* given) {
    const SampleCall call = *given;
    const int threads = call.num_positions * call.vocab > SAMPLE_THREADS_FROM ? max_threads() : 1;
    parallel_runs(call.num_positions, threads, [&](int64_t first, int64_t last) {
        static thread_local RowSampler sampler;
        for (int64_t p = first; p < last; p++) {
            const int64_t row = call.rows[p];
            Wanted wanted{call.temperature[row], call.top_p[row], 0.f, long(call.top_k[row]), 0.};
            if (wanted.temperature > 0.f) {
                wanted.log_min_p = std::log(call.min_p[row]);
                wanted.noise = uniform(call.seed[row], uint64_t(int64_t(call.num_known[row]) + call.offsets[p]));
            }
            bool bad;
            call.tokens[p] = sampler.sample(call.logits + p * call.logits_stride, call.vocab, wanted, bad);
            call.bad[p] = bad;
        }
    });
}
