// The three small things between two steps that TensorRT does not do. Compiled by NVRTC for the GPU that is there;
// no headers, so that nothing but the compiler is needed. UNIT is the widest type that divides one token's row of one
// head; LOGIT_BITS is 16 or 32.

typedef unsigned long long pointer;
typedef unsigned short half_bits;

static __device__ float logit(const void* logits, size_t place) {
#if LOGIT_BITS == 16
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(((const half_bits*)logits)[place]));
    return value;
#else
    return ((const float*)logits)[place];
#endif
}

// Writes the keys and values of new tokens into the buffers.
// grid (tensors, rows, any); from[t]: [rows, heads, width, units]; to[t]: [slots, heads, capacity, units].
// Row r goes to slots[r], its first counts[r] tokens to the places from lengths[r] on.
extern "C" __global__ void write_cache(const pointer* from, const pointer* to, const int* slots, const int* lengths,
                                       const int* counts, int heads, int width, int capacity, int units) {
    const int row = blockIdx.y, slot = slots[row], first = lengths[row];
    const int count = min(counts[row], capacity - first);
    const UNIT* source = (const UNIT*)from[blockIdx.x] + (size_t)row * heads * width * units;
    UNIT* target = (UNIT*)to[blockIdx.x] + (size_t)slot * heads * capacity * units;
    const int total = heads * count * units;
    for (int i = blockIdx.z * blockDim.x + threadIdx.x; i < total; i += gridDim.z * blockDim.x) {
        const int unit = i % units, token = i / units % count, head = i / units / count;
        target[((size_t)head * capacity + first + token) * units + unit] =
            source[((size_t)head * width + token) * units + unit];
    }
}

// Reads logits [rows, vocabulary], one block a row: the most likely token (the lowest id of equal ones), its
// log-probability, and that of given[row] where given is not null. A row with NaN or inf gets NaN.
extern "C" __global__ void read_logits(const void* logits, const int* given, int* best, float* best_log_prob,
                                       float* given_log_prob, int vocabulary) {
    __shared__ float values[1024];
    __shared__ int places[1024];
    const int row = blockIdx.x, thread = threadIdx.x;
    const size_t start = (size_t)row * vocabulary;
    float value = -__int_as_float(0x7f800000);
    int place = 0;
    for (int i = thread; i < vocabulary; i += blockDim.x) {
        const float found = logit(logits, start + i);
        if (found > value) { value = found; place = i; }
    }
    values[thread] = value; places[thread] = place;
    for (int step = blockDim.x / 2; step > 0; step /= 2) {
        __syncthreads();
        if (thread < step) {
            const float other = values[thread + step];
            const int where = places[thread + step];
            if (other > values[thread] || (other == values[thread] && where < places[thread])) {
                values[thread] = other; places[thread] = where;
            }
        }
    }
    __syncthreads();
    const float highest = values[0];
    const int winner = places[0];
    __syncthreads();
    float sum = 0;
    for (int i = thread; i < vocabulary; i += blockDim.x) sum += expf(logit(logits, start + i) - highest);
    values[thread] = sum;
    for (int step = blockDim.x / 2; step > 0; step /= 2) {
        __syncthreads();
        if (thread < step) values[thread] += values[thread + step];
    }
    if (thread == 0) {
        const float log_sum = logf(values[0]);
        best[row] = winner;
        best_log_prob[row] = -log_sum;
        if (given) given_log_prob[row] = logit(logits, start + given[row]) - highest - log_sum;
    }
}

// Prepares the next step of rows that go on: their best token is read next, and their buffers hold one token more.
extern "C" __global__ void advance(const int* best, const int* going, int* input_ids, int* lengths, int rows) {
    const int row = threadIdx.x + blockIdx.x * blockDim.x;
    if (row < rows) {
        input_ids[row] = best[row];
        lengths[row] += going[row];
    }
}
