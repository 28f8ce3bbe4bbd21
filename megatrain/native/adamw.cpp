// AdamW over flat arrays, one pass, in place, behind a plain C ABI that megatrain/native/__init__.py loads.
//
// Every rounding is that of torch.optim.AdamW on the CPU (torch/optim/adam.py, _single_tensor_adam), whose vector
// loops and scalar tails are compiled with contraction: lerp_ and addcmul_ each hold one fused multiply-add, the
// other operations none. Here contraction is off (-ffp-contract=off) and those two are written out.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <numeric>
#include <system_error>
#include <thread>
#include <vector>

// Factors, Arrays and Mkl: the fields of the structures in megatrain/native/__init__.py, in order.
struct Factors {
    float decay, lerp_weight, beta2, one_minus_beta2, bias2_sqrt, eps, negative_step_size, grad_scale;
    uint32_t rounding_key;
};

struct Arrays {
    void* weight;
    int16_t* low;  // null: weight is float32
    void* grad;
    void* exp_avg;
    void* exp_avg_sq;
};

static inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

static inline float float_of(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

static inline float multiply_add(float a, float b, float c) {
#if defined(__FMA__) || defined(__aarch64__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;  // torch's kernels have no fused multiply-add here either
#endif
}

// A NaN whose payload is rounded up can become -0, or lose its payload and become infinite: keep it a NaN.
static inline bool is_nan(uint32_t bits) { return (bits & 0x7fffffffu) > 0x7f800000u; }
static inline uint32_t quiet_nan_high(uint32_t bits) { return bits >> 16 | 0x40u; }

// Scrambles a counter ("lowbias32", Wellons 2018, github.com/skeeto/hash-prospector; public domain).
static inline uint32_t scramble(uint32_t x) {
    x = (x ^ x >> 16) * 0x7feb352du;
    x = (x ^ x >> 15) * 0x846ca68bu;
    return x ^ x >> 16;
}

struct Float32 {
    float* data;
    explicit Float32(void* data, int16_t* = nullptr) : data(static_cast<float*>(data)) {}
    float load(int64_t i) const { return data[i]; }
    void store(int64_t i, float x, uint32_t = 0) const { data[i] = x; }
};

struct Bfloat16 {
    uint16_t* data;
    explicit Bfloat16(void* data) : data(static_cast<uint16_t*>(data)) {}
    float load(int64_t i) const { return float_of(uint32_t(data[i]) << 16); }
    // Stochastic: up in magnitude with the probability of what is cut off. Rounded to nearest, a second moment would
    // freeze: with beta2 = 0.999 a step takes at most 0.1 % off it, and half a bf16 unit is 0.2 to 0.4 %.
    void store(int64_t i, float x, uint32_t random) const {
        const uint32_t bits = bits_of(x);
        const uint32_t rounded = (bits + (random & 0xffffu)) >> 16;
        data[i] = uint16_t(is_nan(bits) ? quiet_nan_high(bits) : rounded);
    }
};

// The fp32 value is (high << 16) + low; see split() in megatrain/optim.py.
struct SplitMaster {
    uint16_t* high;
    int16_t* low;
    SplitMaster(void* high, int16_t* low) : high(static_cast<uint16_t*>(high)), low(low) {}
    float load(int64_t i) const { return float_of((uint32_t(high[i]) << 16) + uint32_t(int32_t(low[i]))); }
    void store(int64_t i, float x) const {
        const uint32_t bits = bits_of(x);
        high[i] = uint16_t(is_nan(bits) ? quiet_nan_high(bits) : (bits + 0x8000u) >> 16);
        low[i] = int16_t(bits);
    }
};

// Note: torch's square root. A torch built with MKL takes square roots in MKL, which need not round to the nearest
// number: on a Zen 4, MKL 2024.2 misses it for one in five. To stay equal to torch, the same function is called here
// wherever torch has it. On two cores of that machine, which no memory holds up, the hardware's exact root would make
// the pass 1.7 times as fast.
struct Mkl {
    void (*vms_sqrt)(int64_t n, const float* x, float* root, int64_t mode);
    int (*set_num_threads_local)(int count);  // returns the former count
};
constexpr int64_t kTorchMode = 0x140102;  // VML_HA | VML_FTZDAZ_OFF | VML_ERRMODE_IGNORE, as in ATen/cpu/vml.h

constexpr int64_t kBlock = 512;  // two float32 blocks stay in the first-level cache

// MKL is three times as slow on exact zeros (embedding rows that no token has met): it is shown ones instead.
static void square_roots(const Mkl* mkl, int64_t n, float* x) {
    if (!mkl) {
        for (int64_t i = 0; i < n; ++i) x[i] = std::sqrt(x[i]);
        return;
    }
    float kept[kBlock];
    int zeros = 0;
#pragma omp simd reduction(+ : zeros)
    for (int64_t i = 0; i < n; ++i) {
        kept[i] = x[i] == 0.0f ? 0.0f : 1.0f;
        zeros += x[i] == 0.0f;
    }
    if (zeros)
        for (int64_t i = 0; i < n; ++i) x[i] = kept[i] == 0.0f ? 1.0f : x[i];
    mkl->vms_sqrt(n, x, x, kTorchMode);
    if (zeros)
        for (int64_t i = 0; i < n; ++i) x[i] = kept[i] == 0.0f ? 0.0f : x[i];
}

// After torch.set_num_threads(n), MKL would start n threads of its own for every block of every thread here.
class OneMklThread {
    const Mkl* mkl;
    int before;

  public:
    explicit OneMklThread(const Mkl* mkl) : mkl(mkl), before(mkl ? mkl->set_num_threads_local(1) : 0) {}
    ~OneMklThread() {
        if (mkl) mkl->set_num_threads_local(before);
    }
};

struct Moments {
    float first, second;
};

// Both moments of every element, as torch takes them from one step to the next.
template <class Moment>
struct MovingAverages {
    Moment exp_avg, exp_avg_sq;
    bool near_start;  // torch's lerp_ sets out from the nearer end
    float coefficient, beta2, one_minus_beta2;
    uint32_t rounding_key;

    MovingAverages(const Arrays& arrays, const Factors& f)
        : exp_avg(arrays.exp_avg), exp_avg_sq(arrays.exp_avg_sq), near_start(std::fabs(f.lerp_weight) < 0.5f),
          coefficient(near_start ? f.lerp_weight : f.lerp_weight - 1.0f), beta2(f.beta2),
          one_minus_beta2(f.one_minus_beta2), rounding_key(f.rounding_key) {}

    Moments advance(int64_t i, float g) const {
        const float m_old = exp_avg.load(i);
        const float m = multiply_add(coefficient, g - m_old, near_start ? m_old : g);
        const float v = multiply_add(one_minus_beta2 * g, g, exp_avg_sq.load(i) * beta2);
        // A counter, not a generator: the bits depend on the element's index and the step, not on the threads.
        const uint32_t random = scramble(uint32_t(i) ^ rounding_key);
        exp_avg.store(i, m, random);
        exp_avg_sq.store(i, v, random >> 16);
        return {m, v};
    }
};

// Returns the sum of the squares of the updated weights, for whoever watches their norm.
template <class Weight, class Grad, class Moment>
static double update_range(const Arrays& arrays, const Factors& factors, const Mkl* mkl, int64_t begin, int64_t end) {
    const Factors f = factors;  // a copy that no store can alias
    const Weight weight(arrays.weight, arrays.low);
    const Grad grad(arrays.grad);
    const MovingAverages<Moment> moments(arrays, f);
    float m_block[kBlock], v_block[kBlock];
    double squares = 0.0;
    for (; begin < end; begin += kBlock) {
        const int64_t n = std::min(kBlock, end - begin);
#pragma omp simd
        for (int64_t k = 0; k < n; ++k) {
            const int64_t i = begin + k;
            const float g = grad.load(i) * f.grad_scale;
            const Moments now = moments.advance(i, g);
            m_block[k] = f.negative_step_size * now.first;
            v_block[k] = now.second;
        }
        square_roots(mkl, n, v_block);
        float block_squares = 0.0f;
#pragma omp simd reduction(+ : block_squares)
        for (int64_t k = 0; k < n; ++k) {
            const float denominator = v_block[k] / f.bias2_sqrt + f.eps;
            const float w = weight.load(begin + k) * f.decay + m_block[k] / denominator;
            weight.store(begin + k, w);
            block_squares += w * w;
        }
        squares += block_squares;
    }
    return squares;
}

// The same with the processor's own root, and a product for one of the divisions: an update differs by a few units in
// its last place. It needs no second loop, so that arithmetic runs while memory is waited for.
template <class Weight, class Grad, class Moment>
static double update_range_fast(const Arrays& arrays, const Factors& factors, const Mkl*, int64_t begin, int64_t end) {
    const Factors f = factors;
    const Weight weight(arrays.weight, arrays.low);
    const Grad grad(arrays.grad);
    const MovingAverages<Moment> moments(arrays, f);
    const float inverse = 1.0f / f.bias2_sqrt;
    double squares = 0.0;
    for (; begin < end; begin += kBlock) {
        const int64_t stop = std::min(begin + kBlock, end);
        float block_squares = 0.0f;
#pragma omp simd reduction(+ : block_squares)
        for (int64_t i = begin; i < stop; ++i) {
            const float g = grad.load(i) * f.grad_scale;
            const Moments now = moments.advance(i, g);
            const float denominator = multiply_add(std::sqrt(now.second), inverse, f.eps);
            const float w = weight.load(i) * f.decay + f.negative_step_size * now.first / denominator;
            weight.store(i, w);
            block_squares += w * w;
        }
        squares += block_squares;
    }
    return squares;
}

using RangeFunction = double (*)(const Arrays&, const Factors&, const Mkl*, int64_t, int64_t);

template <class Weight, class Grad, class Moment>
static RangeFunction choose_rounding(bool as_torch) {
    return as_torch ? update_range<Weight, Grad, Moment> : update_range_fast<Weight, Grad, Moment>;
}

template <class Weight, class Grad>
static RangeFunction choose_moments(bool bf16, bool as_torch) {
    return bf16 ? choose_rounding<Weight, Grad, Bfloat16>(as_torch) : choose_rounding<Weight, Grad, Float32>(as_torch);
}

template <class Weight>
static RangeFunction choose_grad(bool grad_bf16, bool moments_bf16, bool as_torch) {
    return grad_bf16 ? choose_moments<Weight, Bfloat16>(moments_bf16, as_torch)
                     : choose_moments<Weight, Float32>(moments_bf16, as_torch);
}

static RangeFunction choose(bool split, bool grad_bf16, bool moments_bf16, bool as_torch) {
    return split ? choose_grad<SplitMaster>(grad_bf16, moments_bf16, as_torch)
                 : choose_grad<Float32>(grad_bf16, moments_bf16, as_torch);
}

// Note: threads live for one call. An OpenMP team or a pool would save some tens of µs per thread on a pass of
// milliseconds, but an OpenMP team spins before it sleeps and so takes cores from whatever computes meanwhile, and a
// pool needs care at fork and exit. Here the caller blocks in join() and nobody waits between calls. Chunks are
// claimed, not dealt out, so that a core busy elsewhere holds up one chunk at most. Neither changes the result: no
// element depends on another.
//
// Returns the sum of the squares of the updated weights; chunks are added in order, whichever thread did them.
extern "C" double megatrain_adamw(const Arrays* arrays, const Factors* factors, const Mkl* mkl, int64_t numel,
                                  int32_t grad_bf16, int32_t moments_bf16, int32_t as_torch,
                                  int32_t threads) {
    constexpr int64_t kChunk = 1 << 17;
    const int64_t chunks = (numel + kChunk - 1) / kChunk;
    const RangeFunction update = choose(arrays->low != nullptr, grad_bf16, moments_bf16, as_torch);
    std::vector<double> squares(chunks);
    std::atomic<int64_t> next{0};
    const auto work = [&] {
        const OneMklThread guard(mkl);
        for (int64_t chunk; (chunk = next.fetch_add(1, std::memory_order_relaxed)) < chunks;)
            squares[chunk] =
                update(*arrays, *factors, mkl, chunk * kChunk, std::min((chunk + 1) * kChunk, numel));
    };
    const int64_t useful = std::min<int64_t>(threads, chunks);
    std::vector<std::thread> others;
    try {
        while (int64_t(others.size()) + 1 < useful) others.emplace_back(work);
    } catch (const std::system_error&) {
        // The system grants no more threads: those there are do all the work.
    }
    work();
    for (std::thread& other : others) other.join();
    return std::accumulate(squares.begin(), squares.end(), 0.0);
}
