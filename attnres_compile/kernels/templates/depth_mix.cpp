// Depth attention of one site, forward and backward, for any number of sources (arXiv 2603.15031; docs/method.md).
//
// Each token is one row of `width` features per source. A row is read from memory once: a first sweep takes the
// dot products and, by prefetching, fetches the next token's rows; a second sweep runs while the rows are in cache.
// Plain C++ with GNU vector extensions: no header of PyTorch, so that it builds in a moment.

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <omp.h>
#ifdef __linux__
#include <sys/mman.h>
#endif
#ifdef __AVX__
#include <immintrin.h>
#endif

// Inductor's flags forbid fused multiply-add; here it is wanted.
#if defined(__clang__)
#pragma clang fp contract(fast)
#elif defined(__GNUC__)
#pragma GCC optimize("fp-contract=fast")
#endif

#ifdef __AVX512F__
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif

// Bytes of results from which on they are written past the caches; what is smaller is still there for its reader.
#ifndef STREAM
#define STREAM (32 << 20)
#endif

// Tokens whose shares of the query's gradient are added up before they join the sum.
#define PART 64

#define INLINE static inline __attribute__((always_inline))

typedef float floats __attribute__((vector_size(BYTES)));
typedef double doubles __attribute__((vector_size(BYTES)));
typedef uint32_t words __attribute__((vector_size(BYTES)));
typedef uint16_t halves __attribute__((vector_size(BYTES / 2)));

// How a storage type is read and written: `Acc` is what it is computed in, `Vec` a register of those.
struct Float {
    typedef float Store;
    typedef float Acc;
    typedef floats Vec;
    INLINE Vec load(const Store* p) { Vec v; memcpy(&v, p, sizeof v); return v; }
    INLINE void store(Store* p, Vec v) { memcpy(p, &v, sizeof v); }
    INLINE Acc get(const Store* p) { return *p; }
    INLINE void put(Store* p, Acc v) { *p = v; }
};

struct Double {
    typedef double Store;
    typedef double Acc;
    typedef doubles Vec;
    INLINE Vec load(const Store* p) { Vec v; memcpy(&v, p, sizeof v); return v; }
    INLINE void store(Store* p, Vec v) { memcpy(p, &v, sizeof v); }
    INLINE Acc get(const Store* p) { return *p; }
    INLINE void put(Store* p, Acc v) { *p = v; }
};

struct BFloat16 {
    typedef uint16_t Store;
    typedef float Acc;
    typedef floats Vec;
    INLINE Vec load(const Store* p) {
        halves h;
        memcpy(&h, p, sizeof h);
        words bits = __builtin_convertvector(h, words) << 16;
        Vec v;
        memcpy(&v, &bits, sizeof v);
        return v;
    }
    // Round to nearest, ties to even; a NaN stays one.
    INLINE void store(Store* p, Vec v) {
        words bits;
        memcpy(&bits, &v, sizeof bits);
        words rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
        words is_nan = (words)((bits & 0x7fffffffu) > 0x7f800000u);
        halves h = __builtin_convertvector((is_nan & 0x7fc0u) | (~is_nan & rounded), halves);
        memcpy(p, &h, sizeof h);
    }
    INLINE Acc get(const Store* p) {
        uint32_t bits = (uint32_t)*p << 16;
        float v;
        memcpy(&v, &bits, sizeof v);
        return v;
    }
    INLINE void put(Store* p, Acc v) {
        uint32_t bits;
        memcpy(&bits, &v, sizeof bits);
        *p = (bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    }
};

// A store past the caches, for results larger than they are: the line need not be read first. Whole aligned lines only.
template <class T, bool stream> INLINE void write(typename T::Store* p, typename T::Vec v) {
    if constexpr (stream && sizeof(typename T::Store) == sizeof(typename T::Acc)) {
#if defined(__AVX512F__)
        __m512i bits;
        memcpy(&bits, &v, sizeof bits);
        _mm512_stream_si512((__m512i*)p, bits);
        return;
#elif defined(__AVX__)
        __m256i bits;
        memcpy(&bits, &v, sizeof bits);
        _mm256_stream_si256((__m256i*)p, bits);
        return;
#endif
    }
    T::store(p, v);
}

// Sum of a register's lanes: quarters of it first, then the lanes of one.
typedef float float_quad __attribute__((vector_size(16)));
typedef double double_pair __attribute__((vector_size(16)));
INLINE float total(floats v) {
    float_quad part[BYTES / 16];
    memcpy(part, &v, sizeof part);
    for (int k = 1; k < BYTES / 16; k++) part[0] += part[k];
    return (part[0][0] + part[0][1]) + (part[0][2] + part[0][3]);
}
INLINE double total(doubles v) {
    double_pair part[BYTES / 16];
    memcpy(part, &v, sizeof part);
    for (int k = 1; k < BYTES / 16; k++) part[0] += part[k];
    return part[0][0] + part[0][1];
}

INLINE float exponential(float x) { return expf(x); }
INLINE double exponential(double x) { return exp(x); }

struct Shape {
    int64_t sources, tokens, width;
    double eps, gain, scale;
    int normalized, threads;
};

// <query, row>, <row, row> and, for the backward, <grad, row>; the next token's row is called for on the way.
template <class T, bool backward>
INLINE void products(const typename T::Store* row, const typename T::Acc* query, const typename T::Acc* grad,
                     int64_t width, typename T::Acc* dot, typename T::Acc* square, typename T::Acc* slope) {
    typedef typename T::Vec Vec;
    typedef typename T::Acc Acc;
    const int lanes = sizeof(Vec) / sizeof(Acc);
    Vec d[4] = {}, q[4] = {}, s[4] = {};
    int64_t j = 0;
    for (; j + 4 * lanes <= width; j += 4 * lanes) {
        for (int k = 0; k < 4; k++) {
            const int64_t at = j + k * lanes;
            if (k * lanes * sizeof(typename T::Store) % 64 == 0) __builtin_prefetch(row + width + at, 0, 3);
            Vec v = T::load(row + at), w;
            memcpy(&w, query + at, sizeof w);
            d[k] += v * w;
            q[k] += v * v;
            if (backward) {
                memcpy(&w, grad + at, sizeof w);
                s[k] += v * w;
            }
        }
    }
    Acc dots = total(d[0] + d[1] + (d[2] + d[3])), squares = total(q[0] + q[1] + (q[2] + q[3]));
    Acc slopes = backward ? total(s[0] + s[1] + (s[2] + s[3])) : 0;
    for (; j < width; j++) {
        Acc v = T::get(row + j);
        dots += v * query[j];
        squares += v * v;
        if (backward) slopes += v * grad[j];
    }
    *dot = dots;
    *square = squares;
    if (backward) *slope = slopes;
}

// Softmax numerators of `logit` in place; returns their sum.
template <class A> INLINE A soften(A* logit, int64_t sources) {
    A top = logit[0], sum = 0;
    for (int64_t i = 1; i < sources; i++) top = logit[i] > top ? logit[i] : top;
    for (int64_t i = 0; i < sources; i++) sum += logit[i] = exponential(logit[i] - top);
    return sum;
}

template <class T>
static void forward_rows(const Shape& shape, const typename T::Acc* query,
                         const typename T::Store* const* sources, typename T::Store* out, int64_t first,
                         int64_t last, typename T::Acc* scratch) {
    typedef typename T::Vec Vec;
    typedef typename T::Acc Acc;
    const int lanes = sizeof(Vec) / sizeof(Acc), tile = 4 * lanes;
    const int64_t n = shape.sources, width = shape.width;
    Acc *weight = scratch, *rms = scratch + n;
    for (int64_t t = first; t < last; t++) {
        const int64_t base = t * width;
        for (int64_t i = 0; i < n; i++) {
            Acc dot, square;
            products<T, false>(sources[i] + base, query, nullptr, width, &dot, &square, nullptr);
            rms[i] = Acc(1) / (Acc)sqrt(square / width + (Acc)shape.eps);
            weight[i] = (Acc)shape.scale * rms[i] * dot;
        }
        // gain * e / sum, in this order: with equal logits and gain = n it is exactly 1.
        const Acc sum = soften<Acc>(weight, n);
        for (int64_t i = 0; i < n; i++) {
            weight[i] = (Acc)shape.gain * weight[i] / sum;
            if (shape.normalized) weight[i] *= rms[i];
        }
        int64_t j = 0;
        for (; j + tile <= width; j += tile) {
            Vec h[4] = {};
            for (int64_t i = 0; i < n; i++) {
                const typename T::Store* row = sources[i] + base + j;
                for (int k = 0; k < 4; k++) h[k] += weight[i] * T::load(row + k * lanes);
            }
            for (int k = 0; k < 4; k++) T::store(out + base + j + k * lanes, h[k]);
        }
        for (; j < width; j++) {
            Acc h = 0;
            for (int64_t i = 0; i < n; i++) h += weight[i] * T::get(sources[i] + base + j);
            T::put(out + base + j, h);
        }
    }
}

// Gradients of the sources, each added to what `have` holds for it, and this thread's share of the query's.
// A null in `give` is a source whose gradient nobody wants, a null in `have` one with nothing to add to.
template <class T, bool stream>
static void backward_rows(const Shape& shape, const typename T::Store* grad, const typename T::Acc* query,
                          const typename T::Store* const* sources, const typename T::Store* const* have,
                          typename T::Store* const* give, typename T::Acc* query_grad, int64_t first, int64_t last,
                          typename T::Acc* scratch) {
    typedef typename T::Vec Vec;
    typedef typename T::Acc Acc;
    typedef typename T::Store Store;
    const int lanes = sizeof(Vec) / sizeof(Acc), tile = 4 * lanes;
    const int64_t n = shape.sources, width = shape.width;
    const Acc gain = (Acc)shape.gain, scale = (Acc)shape.scale;
    Acc *weight = scratch, *rms = weight + n, *dot = rms + n, *slope = dot + n;
    Acc *of_grad = slope + n, *of_query = of_grad + n, *of_row = of_query + n, *g = of_row + n;
    for (int64_t t = first; t < last; t++) {
        const int64_t base = t * width;
        int64_t j = 0;
        for (; j + lanes <= width; j += lanes) {
            __builtin_prefetch(grad + base + width + j, 0, 3);
            Vec v = T::load(grad + base + j);
            memcpy(g + j, &v, sizeof v);
        }
        for (; j < width; j++) g[j] = T::get(grad + base + j);
        for (int64_t i = 0; i < n; i++) {
            if (have[i])
                for (j = 0; j < width; j += 64 / sizeof(Store)) __builtin_prefetch(have[i] + base + j, 0, 3);
            Acc square;
            products<T, true>(sources[i] + base, query, g, width, dot + i, &square, slope + i);
            rms[i] = Acc(1) / (Acc)sqrt(square / width + (Acc)shape.eps);
            weight[i] = scale * rms[i] * dot[i];
        }
        const Acc sum = soften<Acc>(weight, n);
        Acc delta = 0;
        for (int64_t i = 0; i < n; i++) {
            of_grad[i] = gain * weight[i] / sum;
            weight[i] /= sum;
            slope[i] *= shape.normalized ? gain * rms[i] : gain;
            delta += weight[i] * slope[i];
        }
        for (int64_t i = 0; i < n; i++) {
            const Acc r = rms[i], logit_grad = scale * weight[i] * (slope[i] - delta);
            const Acc cubed = r * r * r / width;
            if (shape.normalized) of_grad[i] *= r;
            of_query[i] = logit_grad * r;
            // The value's own normalisation adds <dk, v> = weight * <g, v>; slope holds gain * r * <g, v>.
            of_row[i] = -logit_grad * dot[i] * cubed - (shape.normalized ? weight[i] * slope[i] / r * cubed : Acc(0));
        }
        for (j = 0; j + tile <= width; j += tile) {
            Vec gs[4], qs[4], sums[4];
            for (int k = 0; k < 4; k++) {
                memcpy(gs + k, g + j + k * lanes, sizeof(Vec));
                memcpy(qs + k, query + j + k * lanes, sizeof(Vec));
                memcpy(sums + k, query_grad + j + k * lanes, sizeof(Vec));
            }
            for (int64_t i = 0; i < n; i++) {
                const Store* row = sources[i] + base + j;
                Vec v[4];
                for (int k = 0; k < 4; k++) {
                    v[k] = T::load(row + k * lanes);
                    sums[k] += of_query[i] * v[k];
                    v[k] = of_grad[i] * gs[k] + of_query[i] * qs[k] + of_row[i] * v[k];
                }
                if (have[i]) {
                    const Store* sofar = have[i] + base + j;
                    for (int k = 0; k < 4; k++) v[k] += T::load(sofar + k * lanes);
                }
                if (give[i])
                    for (int k = 0; k < 4; k++) write<T, stream>(give[i] + base + j + k * lanes, v[k]);
            }
            for (int k = 0; k < 4; k++) memcpy(query_grad + j + k * lanes, sums + k, sizeof(Vec));
        }
        for (; j < width; j++) {
            for (int64_t i = 0; i < n; i++) {
                const Acc v = T::get(sources[i] + base + j);
                query_grad[j] += of_query[i] * v;
                Acc d = of_grad[i] * g[j] + of_query[i] * query[j] + of_row[i] * v;
                if (have[i]) d += T::get(have[i] + base + j);
                if (give[i]) T::put(give[i] + base + j, d);
            }
        }
    }
}

// Ask for large pages under a large result: memory fresh from the system costs more to enter, page by page, than to
// fill. It is a hint for all large pages that the result touches; pages that are there already stay as they are.
static void expect(void* result, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
    const uintptr_t large = 2 << 20, begin = (uintptr_t)result & -large;
    const uintptr_t end = ((uintptr_t)result + bytes + large - 1) & -large;
    if (bytes >= 4 << 20) madvise((void*)begin, end - begin, MADV_HUGEPAGE);
#endif
}

template <class T>
static int forward(const Shape& shape, const void* query, const void* const* sources, void* out) {
    typedef typename T::Acc Acc;
    typedef typename T::Store Store;
    int failed = 0;
    expect(out, shape.tokens * shape.width * sizeof(Store));
#pragma omp parallel num_threads(shape.threads) if (shape.threads > 1) reduction(| : failed)
    {
        const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
        const int64_t first = shape.tokens * me / team, last = shape.tokens * (me + 1) / team;
        Acc* scratch = (Acc*)malloc(sizeof(Acc) * 2 * shape.sources);
        if (!scratch)
            failed = 1;
        else
            forward_rows<T>(shape, (const Acc*)query, (const Store* const*)sources, (Store*)out, first, last,
                            scratch);
        free(scratch);
    }
    return failed;
}

// The threads' shares of the query's gradient are added in the threads' order: equal thread counts, equal bits.
template <class T>
static int backward(const Shape& shape, const void* grad, const void* query, const void* const* sources,
                    const void* const* have, void* const* give, void* query_grad) {
    typedef typename T::Acc Acc;
    typedef typename T::Store Store;
    const int64_t width = shape.width;
    Acc* shares = (Acc*)calloc((size_t)shape.threads * width, sizeof(Acc));
    if (!shares) return 1;
    int failed = 0;
    const int64_t bytes = shape.tokens * width * sizeof(Store);
    int64_t written = 0;
    bool aligned = width * sizeof(Store) % 64 == 0;
    for (int64_t i = 0; i < shape.sources; i++) {
        if (!give[i]) continue;
        expect(give[i], bytes);
        written += bytes;
        aligned &= (uintptr_t)give[i] % 64 == 0;
    }
    const bool stream = aligned && written >= STREAM;
#pragma omp parallel num_threads(shape.threads) if (shape.threads > 1) reduction(| : failed)
    {
        const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
        const int64_t first = shape.tokens * me / team, last = shape.tokens * (me + 1) / team;
        Acc* scratch = (Acc*)malloc(sizeof(Acc) * (7 * shape.sources + 2 * width));
        Acc *share = shares + me * width, *part = scratch + 7 * shape.sources + width;
        failed = !scratch;
        // The query's gradient is a sum over all tokens: in parts, so that rounding grows with the root of their number.
        for (int64_t t = first; t < last && scratch; t += PART) {
            memset(part, 0, sizeof(Acc) * width);
            (stream ? backward_rows<T, true> : backward_rows<T, false>)(
                shape, (const Store*)grad, (const Acc*)query, (const Store* const*)sources,
                (const Store* const*)have, (Store* const*)give, part, t, t + PART < last ? t + PART : last, scratch);
            for (int64_t j = 0; j < width; j++) share[j] += part[j];
        }
#ifdef __AVX__
        _mm_sfence();
#endif
        free(scratch);
    }
    Acc* sum = (Acc*)query_grad;
    for (int64_t j = 0; j < width; j++) {
        Acc s = 0;
        for (int k = 0; k < shape.threads; k++) s += shares[k * width + j];
        sum[j] = s;
    }
    free(shares);
    return failed;
}

// kind: 0 float32, 1 float64, 2 bfloat16. `query` and `query_grad` are in the type that is computed in. Returns 0,
// or 1 when memory ran out.
extern "C" int attnres_forward(int kind, int64_t sources, int64_t tokens, int64_t width, double eps, double gain,
                               double scale, int normalized, int threads, const void* query,
                               const void* const* rows, void* out) {
    const Shape shape = {sources, tokens, width, eps, gain, scale, normalized, threads};
    if (kind == 0) return forward<Float>(shape, query, rows, out);
    if (kind == 1) return forward<Double>(shape, query, rows, out);
    return forward<BFloat16>(shape, query, rows, out);
}

extern "C" int attnres_backward(int kind, int64_t sources, int64_t tokens, int64_t width, double eps, double gain,
                                double scale, int normalized, int threads, const void* query,
                                const void* const* rows, const void* grad, const void* const* have,
                                void* const* give, void* query_grad) {
    const Shape shape = {sources, tokens, width, eps, gain, scale, normalized, threads};
    if (kind == 0) return backward<Float>(shape, grad, query, rows, have, give, query_grad);
    if (kind == 1) return backward<Double>(shape, grad, query, rows, have, give, query_grad);
    return backward<BFloat16>(shape, grad, query, rows, have, give, query_grad);
}
