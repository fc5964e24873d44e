// hip.cc - a HIP runtime whose device is the stand-in of simt.h; see hip.h

#define ROCQ_DEVICE
#include "rocq.h"

#define SIMT_ENGINE_ONLY
#include "simt.h"

#include "hip.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

namespace {

enum {
    HIP_OK = 0, HIP_INVALID_VALUE = 1, HIP_OUT_OF_MEMORY = 2, HIP_INVALID_DEVICE = 101,
    HIP_NO_BINARY = 209, HIP_INVALID_HANDLE = 400, HIP_NOT_FOUND = 500, HIP_NOT_READY = 600,
    HIP_LAUNCH_FAILURE = 719, HIP_CAPTURE_UNSUPPORTED = 900, HIP_CAPTURE_INVALIDATED = 901
};
enum {
    QUEUE_LIMIT = 4096,            // operations of a stream after which the first ones run
    PRIVATE_BYTES = 1 << 20        // device blocks up to this size are closed to the host
};

struct operation {
    enum { LAUNCH, COPY, FILL, MARK, WAIT, HIDE, SHOW } what;
    simt_kernel *kernel;
    uint32_t grid_x, grid_z, threads;
    std::shared_ptr<std::vector<char>> args; // shared with the graph it may come from
    void *dst;
    const void *src;
    size_t size;
    int kind; // of a copy; the byte of a fill
    const void *exec; // the executable graph that launched it, or NULL
    struct event *mark;  // of a MARK: gets the time
    struct stream *on;   // of a WAIT: this stream
    uint64_t after;      // has to have run so many operations
};
typedef std::vector<operation> operations;

// A copy to the device that a replay does not see: what was there before, and what it brought.
struct unseen_copy {
    char *dst;
    std::vector<char> before, after;
};

struct stream {
    operations queue;
    size_t done = 0;      // operations of queue that have run
    uint64_t base = 0;    // operations that ran and were dropped from queue
    bool blocking = true; // with the NULL stream
    simt_stream made = {0, 0, -1, 0};
    int64_t number = 0;   // of those made
    bool capturing = false, invalid = false;
    pthread_t capturer;
    operations captured;
};
struct event {
    stream *on = nullptr;
    uint64_t after = 0; // operations of the stream up to and with its mark
    double ms = 0;      // of the host's clock, when that was reached
};
struct block {
    size_t size;
    int device;
};

struct runtime {
    std::recursive_mutex lock;
    std::map<uintptr_t, block> device, host; // by address
    std::set<stream *> streams;
    int64_t n_streams = 0; // made so far
    std::set<event *> events;
    std::set<operations *> graphs, execs;
    std::set<int *> modules;
    std::map<int, size_t> used; // bytes by device
    char *reserve = nullptr;    // of blocks that touch
    size_t reserved = 0, taken = 0;
    int n_touching = 0;
    int open = 0;               // runs of streams, one in another, that see device memory
    stream null_stream;
    size_t memory = (size_t)1 << 30;
    int n_devices = 1, work = SIMT_LATE, image_error = 0, selftest_error = 0, target = 0;
    int least = 1, greatest = -1; // priorities
    int64_t calls = 0, fail_at = 0;
    int fail_code = 0;
    bool fail_on = false, lost = false;
    int replay = SIMT_REPLAY_RIGHT, replay_node = -1;
    std::map<simt_kernel *, std::shared_ptr<std::vector<char>>> last_args; // not of replays
    std::vector<unseen_copy> unseen;
    double (*clock)(void) = nullptr; // milliseconds; nullptr: the host's
    std::map<const simt_kernel *, int64_t> lds; // most that a launch asked for
    const simt_elsewhere *elsewhere = nullptr;

    runtime() {
        const char *when = getenv("SIMT_WORK");
        if (when) work = atoi(when);
    }
};
runtime &hip() { // never destroyed, for programs that close contexts as they exit
    static runtime *r = new runtime;
    return *r;
}
thread_local int current_device;

// A wrong call of the host.
#define misuse(...) simt_error(nullptr, 0, __VA_ARGS__)

// The first lines of every runtime call: it is counted, and may be the one to fail.
int enter() {
    runtime &r = hip();
    r.calls++;
    if (r.lost) return r.fail_code;
    if (r.fail_at && r.calls == r.fail_at) {
        r.fail_at = 0;
        r.lost = r.fail_on;
        if (r.lost) {
            for (stream *s : r.streams) s->queue.clear(), s->done = 0;
            r.null_stream.queue.clear();
            r.null_stream.done = 0;
        }
        return r.fail_code;
    }
    return HIP_OK;
}
#define ENTER()                                                \
    std::lock_guard<std::recursive_mutex> hold(hip().lock);    \
    const int failure = enter()
#define ENTER_OR_FAIL()                                        \
    ENTER();                                                   \
    if (failure) return failure

// ---------------------------------------------------------------------------------------------
// memory
// ---------------------------------------------------------------------------------------------

const block *block_of(const std::map<uintptr_t, block> &blocks, const void *p, size_t *room) {
    auto it = blocks.upper_bound((uintptr_t)p);
    if (it == blocks.begin()) return nullptr;
    --it;
    const size_t at = (uintptr_t)p - it->first;
    if (at >= it->second.size) return nullptr;
    *room = it->second.size - at;
    return &it->second;
}

// Memory for a block, and back.
int take_block(void **ptr, size_t size) {
    runtime &r = hip();
    if (!r.reserve) return posix_memalign(ptr, 256, size);
    if (size > r.reserved - r.taken) return 1;
    *ptr = r.reserve + r.taken;
    r.taken += (size + 255) / 256 * 256;
    r.n_touching++;
    return 0;
}
void give_block(void *ptr) {
    runtime &r = hip();
    const bool touching = r.reserve && (char *)ptr >= r.reserve &&
                          (char *)ptr < r.reserve + r.reserved;
    if (!touching) free(ptr);
    else if (--r.n_touching == 0) free(r.reserve), r.reserve = nullptr;
}

void close_block(uintptr_t at, const block &b, bool closed) {
#if SIMT_ASAN
    if (b.size > PRIVATE_BYTES) return;
    if (closed) __asan_poison_memory_region((void *)at, b.size);
    else __asan_unpoison_memory_region((void *)at, b.size);
#else
    (void)at, (void)b, (void)closed;
#endif
}
// Kernels and copies see device memory, the host does not.
struct device_access {
    device_access() {
        if (hip().open++ > 0) return;
        for (auto &b : hip().device) close_block(b.first, b.second, false);
    }
    ~device_access() {
        if (--hip().open > 0) return;
        for (auto &b : hip().device) close_block(b.first, b.second, true);
    }
};

// Both sides of a copy or fill must be where kind says, and inside.
int check_range(const char *call, const char *side, const void *p, size_t size, bool on_device) {
    size_t room = 0;
    const block *b = block_of(hip().device, p, &room);
    if (!p || (b != nullptr) != on_device) {
        misuse("%s: %s %p is %s device memory", call, side, p, b ? "in" : "not in");
        return HIP_INVALID_VALUE;
    }
    if (!on_device) b = block_of(hip().host, p, &room);
    if (b && size > room) {
        misuse("%s: %s %p has %zu bytes of %zu", call, side, p, room, size);
        return HIP_INVALID_VALUE;
    }
    return HIP_OK;
}

// ---------------------------------------------------------------------------------------------
// queues
// ---------------------------------------------------------------------------------------------

int run_until(stream *s, uint64_t count);

int run_elsewhere(const operation &o) {
    const simt_elsewhere &to = *hip().elsewhere;
    for (auto *blocks : {&hip().device, &hip().host}) {
        for (auto &b : *blocks) to.memory((const void *)b.first, b.second.size);
    }
    const int error = to.launch(o.kernel->name, o.grid_x, o.grid_z, o.threads, o.args->data());
    for (auto *blocks : {&hip().device, &hip().host}) {
        for (auto &b : *blocks) to.memory((const void *)b.first, 0);
    }
    return error;
}

int run_one(const operation &o) {
    switch (o.what) {
    case operation::LAUNCH: {
        if (hip().elsewhere) return run_elsewhere(o);
        if (!o.exec) hip().unseen.clear();
        const int errors = simt_run(o.kernel, o.grid_x, o.grid_z, o.threads, o.args->data());
        if (strcmp(o.kernel->name, "selftest") == 0) {
            const rocq_k_selftest_args *a =
                (const rocq_k_selftest_args *)(const void *)o.args->data();
            if (a->out && hip().selftest_error) a->out[4] ^= (uint32_t)hip().selftest_error;
            if (a->out && hip().target) a->out[0] = (uint32_t)hip().target;
        }
        return errors ? HIP_LAUNCH_FAILURE : HIP_OK;
    }
    case operation::COPY:
        if (o.kind == ROCQ_HIP_TO_DEVICE && hip().replay == SIMT_REPLAY_STALE_COPIES) {
            char *dst = (char *)o.dst;
            const char *src = (const char *)o.src;
            hip().unseen.push_back({dst, std::vector<char>(dst, dst + o.size),
                                    std::vector<char>(src, src + o.size)});
        }
        memmove(o.dst, o.src, o.size);
        return HIP_OK;
    case operation::HIDE: // the last copy first, so that what was there before all of them is back
        for (auto c = hip().unseen.rbegin(); c != hip().unseen.rend(); ++c) {
            memcpy(c->dst, c->before.data(), c->before.size());
        }
        return HIP_OK;
    case operation::SHOW: // but where the replay has written
        for (const unseen_copy &c : hip().unseen) {
            for (size_t i = 0; i < c.before.size(); i++) {
                if (c.dst[i] == c.before[i]) c.dst[i] = c.after[i];
            }
        }
        hip().unseen.clear();
        return HIP_OK;
    case operation::FILL: memset(o.dst, o.kind, o.size); return HIP_OK;
    case operation::WAIT: return hip().streams.count(o.on) ? run_until(o.on, o.after) : HIP_OK;
    default:
        if (o.mark && hip().events.count(o.mark)) {
            o.mark->ms = hip().clock ? hip().clock() : std::chrono::duration<double, std::milli>(
                std::chrono::steady_clock::now().time_since_epoch()).count();
        }
        return HIP_OK;
    }
}

// Runs the stream's operations up to the given count since it was made; the first error.
int run_until(stream *s, uint64_t count) {
    int error = HIP_OK;
    if (s->base + s->done >= count) return error;
    device_access access;
    while (s->base + s->done < count && s->done < s->queue.size()) {
        const operation o = s->queue[s->done++];
        const int e = run_one(o);
        if (!error) error = e;
    }
    if (s->done == s->queue.size()) {
        s->base += s->done;
        s->queue.clear();
        s->done = 0;
    }
    return error;
}
int run_all(stream *s) { return run_until(s, UINT64_MAX); }

int run_device() {
    int error = run_all(&hip().null_stream);
    for (stream *s : hip().streams) {
        const int e = run_all(s);
        if (!error) error = e;
    }
    return error;
}

stream *find_stream(const char *call, void *handle) {
    if (!handle) return &hip().null_stream;
    if (hip().streams.count((stream *)handle)) return (stream *)handle;
    misuse("%s: %p is not a stream", call, handle);
    return nullptr;
}

int submit(stream *s, const operation &o) {
    if (s->capturing) {
        if (o.what != operation::MARK && o.what != operation::WAIT) s->captured.push_back(o);
        return HIP_OK;
    }
    if (s == &hip().null_stream) {
        for (stream *other : hip().streams) {
            if (other->blocking) run_all(other);
        }
    } else if (s->blocking) {
        run_all(&hip().null_stream);
    }
    s->queue.push_back(o);
    if (hip().work == SIMT_AT_ONCE) return run_all(s);
    if (s->queue.size() - s->done > QUEUE_LIMIT) {
        return run_until(s, s->base + s->done + QUEUE_LIMIT / 2);
    }
    return HIP_OK;
}

// A thread whose stream records must not call what waits or changes memory.
int not_while_capturing(const char *call) {
    for (stream *s : hip().streams) {
        if (s->capturing && pthread_equal(s->capturer, pthread_self())) {
            misuse("%s while a stream is being captured", call);
            s->invalid = true;
            return HIP_CAPTURE_UNSUPPORTED;
        }
    }
    return HIP_OK;
}
#define NOT_WHILE_CAPTURING(call)                                            \
    if (const int capture_error = not_while_capturing(call)) return capture_error

int launch(const char *call, simt_kernel *kernel, unsigned grid_x, unsigned grid_y, unsigned grid_z,
           unsigned threads, unsigned lds, const void *args, void *on) {
    stream *s = find_stream(call, on);
    if (!s) return HIP_INVALID_HANDLE;
    if (!kernel || !args || grid_x == 0 || grid_y != 1 || grid_z == 0 || grid_z > 65535 ||
        threads == 0 || threads > kernel->max_threads || lds > SIMT_LDS_GRANTED) {
        misuse("%s: %s, %u by %u by %u blocks of %u threads, %u bytes of LDS", call,
               kernel ? kernel->name : "no such kernel", grid_x, grid_y, grid_z, threads, lds);
        return HIP_INVALID_VALUE;
    }
    hip().lds[kernel] = std::max(hip().lds[kernel], (int64_t)lds);
    operation o = {};
    o.what = operation::LAUNCH;
    o.kernel = kernel;
    o.grid_x = grid_x;
    o.grid_z = grid_z;
    o.threads = threads;
    const char *bytes = (const char *)args;
    o.args = std::make_shared<std::vector<char>>(bytes, bytes + kernel->args_size);
    if (!s->capturing) hip().last_args[kernel] = o.args;
    return submit(s, o);
}

template <typename T> int destroy(std::set<T *> &all, const char *call, void *handle) {
    if (!all.erase((T *)handle)) {
        misuse("%s: %p is none", call, handle);
        return HIP_INVALID_HANDLE;
    }
    delete (T *)handle;
    return HIP_OK;
}

} // namespace

// ---------------------------------------------------------------------------------------------
// the runtime
// ---------------------------------------------------------------------------------------------

#pragma GCC visibility push(default)
extern "C" {

int hipGetDeviceCount(int *n) {
    ENTER_OR_FAIL();
    *n = hip().n_devices;
    return *n ? HIP_OK : 100; // no device
}
int hipSetDevice(int device) {
    ENTER_OR_FAIL();
    if (device < 0 || device >= hip().n_devices) return HIP_INVALID_DEVICE;
    current_device = device;
    return HIP_OK;
}
int hipDeviceGetAttribute(int *value, int attribute, int device) {
    ENTER_OR_FAIL();
    if (device < 0 || device >= hip().n_devices) return HIP_INVALID_DEVICE;
    switch (attribute) {
    case ROCQ_HIP_CLOCK_KHZ: *value = 2500000; return HIP_OK;
    case ROCQ_HIP_INTEGRATED: *value = 0; return HIP_OK;
    case ROCQ_HIP_MEMORY_BITS: *value = 384; return HIP_OK;
    case ROCQ_HIP_MEMORY_KHZ: *value = 1249000; return HIP_OK;
    case ROCQ_HIP_UNITS: *value = 4; return HIP_OK; // few: small problems are many to a unit
    default: misuse("hipDeviceGetAttribute: %d", attribute); return HIP_INVALID_VALUE;
    }
}
int hipDeviceGetName(char *name, int size, int device) {
    ENTER_OR_FAIL();
    if (device < 0 || device >= hip().n_devices) return HIP_INVALID_DEVICE;
    snprintf(name, (size_t)size, "%s %d", hip().elsewhere ? "elsewhere" : "simt", device);
    return HIP_OK;
}
int hipDeviceGetPCIBusId(char *pci, int size, int device) {
    ENTER_OR_FAIL();
    if (device < 0 || device >= hip().n_devices) return HIP_INVALID_DEVICE;
    snprintf(pci, (size_t)size, "0000:%02x:00.0", 3 + device);
    return HIP_OK;
}
int hipDeviceTotalMem(size_t *bytes, int device) {
    ENTER_OR_FAIL();
    if (device < 0 || device >= hip().n_devices) return HIP_INVALID_DEVICE;
    *bytes = hip().memory;
    return HIP_OK;
}

int hipMalloc(void **ptr, size_t size) {
    ENTER_OR_FAIL();
    NOT_WHILE_CAPTURING("hipMalloc");
    *ptr = nullptr;
    if (size == 0) return HIP_OK;
    if (size > hip().memory - hip().used[current_device] || take_block(ptr, size)) {
        return HIP_OUT_OF_MEMORY;
    }
    // What nobody has written is NaN in every format, and never twice the same.
    static std::atomic<uint32_t> allocations;
    uint32_t random = ++allocations;
    memset(*ptr, 0xff, size);
    for (size_t i = 0; i < size / 2; i++) {
        random = random * 1664525u + 1013904223u;
        ((uint16_t *)*ptr)[i] = (uint16_t)(0xff81 + (random >> 16) % 127);
    }
    const block b = {size, current_device};
    hip().device[(uintptr_t)*ptr] = b;
    hip().used[current_device] += size;
    close_block((uintptr_t)*ptr, b, true);
    return HIP_OK;
}
int hipFree(void *ptr) {
    ENTER();
    if (!ptr) return failure;
    NOT_WHILE_CAPTURING("hipFree");
    auto it = hip().device.find((uintptr_t)ptr);
    if (it == hip().device.end()) {
        misuse("hipFree: %p is not an allocation", ptr);
        return HIP_INVALID_VALUE;
    }
    const int error = hip().work == SIMT_LATEST ? HIP_OK : run_device();
    hip().used[it->second.device] -= it->second.size;
    close_block(it->first, it->second, false);
    hip().device.erase(it);
    give_block(ptr);
    return failure ? failure : error;
}
int hipHostMalloc(void **ptr, size_t size, unsigned) {
    ENTER_OR_FAIL();
    NOT_WHILE_CAPTURING("hipHostMalloc");
    *ptr = nullptr;
    if (size == 0) return HIP_OK;
    if (posix_memalign(ptr, 256, size)) return HIP_OUT_OF_MEMORY;
    memset(*ptr, 0xff, size);
    hip().host[(uintptr_t)*ptr] = {size, current_device};
    return HIP_OK;
}
int hipHostFree(void *ptr) {
    ENTER();
    if (!ptr) return failure;
    NOT_WHILE_CAPTURING("hipHostFree");
    if (!hip().host.erase((uintptr_t)ptr)) {
        misuse("hipHostFree: %p is not an allocation", ptr);
        return HIP_INVALID_VALUE;
    }
    free(ptr);
    return failure;
}
// Memory that is the caller's: copies may use it until it is unregistered.
int hipHostRegister(void *ptr, size_t size, unsigned) {
    ENTER_OR_FAIL();
    NOT_WHILE_CAPTURING("hipHostRegister");
    if (!ptr || size == 0 || hip().host.count((uintptr_t)ptr)) {
        misuse("hipHostRegister: %p of %zu bytes", ptr, size);
        return HIP_INVALID_VALUE;
    }
    hip().host[(uintptr_t)ptr] = {size, current_device};
    return HIP_OK;
}
int hipHostUnregister(void *ptr) {
    ENTER();
    NOT_WHILE_CAPTURING("hipHostUnregister");
    if (!hip().host.erase((uintptr_t)ptr)) {
        misuse("hipHostUnregister: %p is not registered", ptr);
        return HIP_INVALID_VALUE;
    }
    return failure;
}

int hipMemcpyAsync(void *dst, const void *src, size_t size, int kind, void *on) {
    ENTER_OR_FAIL();
    stream *s = find_stream("hipMemcpyAsync", on);
    if (!s) return HIP_INVALID_HANDLE;
    bool to_device = kind != ROCQ_HIP_TO_HOST, from_device = kind != ROCQ_HIP_TO_DEVICE;
    if (kind == ROCQ_HIP_BY_ADDRESS) {
        size_t room;
        to_device = block_of(hip().device, dst, &room) != nullptr;
        from_device = block_of(hip().device, src, &room) != nullptr;
    } else if (kind < ROCQ_HIP_TO_DEVICE || kind > ROCQ_HIP_ON_DEVICE) {
        misuse("hipMemcpyAsync: kind %d", kind);
        return HIP_INVALID_VALUE;
    }
    if (size == 0) return HIP_OK;
    int error = check_range("hipMemcpyAsync", "destination", dst, size, to_device);
    if (!error) error = check_range("hipMemcpyAsync", "source", src, size, from_device);
    if (error) return error;
    operation o = {};
    o.what = operation::COPY;
    o.dst = dst;
    o.src = src;
    o.size = size;
    o.kind = kind;
    return submit(s, o);
}
int hipMemsetAsync(void *dst, int byte, size_t size, void *on) {
    ENTER_OR_FAIL();
    stream *s = find_stream("hipMemsetAsync", on);
    if (!s) return HIP_INVALID_HANDLE;
    if (size == 0) return HIP_OK;
    if (const int error = check_range("hipMemsetAsync", "destination", dst, size, true)) {
        return error;
    }
    operation o = {};
    o.what = operation::FILL;
    o.dst = dst;
    o.size = size;
    o.kind = byte;
    return submit(s, o);
}

static int make_stream(void **handle, simt_stream made) {
    stream *s = new stream;
    s->blocking = !(made.flags & ROCQ_HIP_NON_BLOCKING);
    s->made = made;
    s->number = ++hip().n_streams;
    hip().streams.insert(s);
    *handle = s;
    return HIP_OK;
}
int hipStreamCreateWithFlags(void **handle, unsigned flags) {
    ENTER_OR_FAIL();
    return make_stream(handle, {flags, 0, -1, 0});
}
int hipDeviceGetStreamPriorityRange(int *least, int *greatest) {
    ENTER_OR_FAIL();
    *least = hip().least;
    *greatest = hip().greatest;
    return HIP_OK;
}
int hipStreamCreateWithPriority(void **handle, unsigned flags, int priority) {
    ENTER_OR_FAIL();
    if (priority < hip().greatest || priority > hip().least) {
        misuse("hipStreamCreateWithPriority: %d", priority);
    }
    return make_stream(handle, {flags, priority, -1, 0});
}
int hipExtStreamCreateWithCUMask(void **handle, uint32_t n_words, const uint32_t *mask) {
    ENTER_OR_FAIL();
    int n = 0;
    for (uint32_t i = 0; i < n_words; i++) {
        n += __builtin_popcount(mask[i]);
        if ((mask[i] & 0x55555555u) == (mask[i] >> 1 & 0x55555555u)) continue;
        misuse("hipExtStreamCreateWithCUMask: half a WGP in %08x", (unsigned)mask[i]);
    }
    if (n == 0) misuse("hipExtStreamCreateWithCUMask: no compute unit");
    return make_stream(handle, {0, 0, n, n_words ? mask[0] : 0}); // HIP's has default flags
}
int hipStreamDestroy(void *handle) {
    ENTER();
    stream *s = handle ? find_stream("hipStreamDestroy", handle) : nullptr;
    if (!s) return HIP_INVALID_HANDLE;
    const int error = run_all(s);
    for (event *e : hip().events) {
        if (e->on == s) e->on = nullptr;
    }
    hip().streams.erase(s);
    delete s;
    return failure ? failure : error;
}
int hipStreamSynchronize(void *handle) {
    ENTER_OR_FAIL();
    stream *s = find_stream("hipStreamSynchronize", handle);
    if (!s) return HIP_INVALID_HANDLE;
    NOT_WHILE_CAPTURING("hipStreamSynchronize");
    return run_all(s);
}

int hipEventCreateWithFlags(void **handle, unsigned) {
    ENTER_OR_FAIL();
    event *e = new event;
    hip().events.insert(e);
    *handle = e;
    return HIP_OK;
}
int hipEventDestroy(void *handle) {
    ENTER();
    const int error = destroy(hip().events, "hipEventDestroy", handle);
    return failure ? failure : error;
}
int hipEventRecord(void *handle, void *on) {
    ENTER_OR_FAIL();
    stream *s = find_stream("hipEventRecord", on);
    if (!s || !hip().events.count((event *)handle)) {
        if (s) misuse("hipEventRecord: %p is not an event", handle);
        return HIP_INVALID_HANDLE;
    }
    event *e = (event *)handle;
    operation o = {};
    o.what = operation::MARK;
    o.mark = e;
    const int error = submit(s, o);
    if (!s->capturing) {
        e->on = s;
        e->after = s->base + s->queue.size();
    }
    return error;
}
int hipEventSynchronize(void *handle) {
    ENTER_OR_FAIL();
    if (!hip().events.count((event *)handle)) {
        misuse("hipEventSynchronize: %p is not an event", handle);
        return HIP_INVALID_HANDLE;
    }
    NOT_WHILE_CAPTURING("hipEventSynchronize");
    event *e = (event *)handle;
    return e->on ? run_until(e->on, e->after) : HIP_OK;
}

int hipEventElapsedTime(float *ms, void *start, void *stop) {
    ENTER_OR_FAIL();
    for (void *handle : {start, stop}) {
        event *e = (event *)handle;
        if (!hip().events.count(e)) {
            misuse("hipEventElapsedTime: %p is not an event", handle);
            return HIP_INVALID_HANDLE;
        }
        if (e->on && e->on->base + e->on->done < e->after) return HIP_NOT_READY;
    }
    *ms = (float)(((event *)stop)->ms - ((event *)start)->ms);
    return HIP_OK;
}
int hipStreamWaitEvent(void *on, void *handle, unsigned flags) {
    ENTER_OR_FAIL();
    stream *s = find_stream("hipStreamWaitEvent", on);
    event *e = (event *)handle;
    if (!s || !hip().events.count(e) || flags != 0) {
        if (s) misuse("hipStreamWaitEvent: %p is not an event, or flags %u", handle, flags);
        return HIP_INVALID_HANDLE;
    }
    if (!e->on || e->on == s) return HIP_OK;
    operation o = {};
    o.what = operation::WAIT;
    o.on = e->on;
    o.after = e->after;
    return submit(s, o);
}
int hipMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    ENTER_OR_FAIL();
    *total_bytes = hip().memory;
    *free_bytes = hip().memory - hip().used[current_device];
    return HIP_OK;
}
int hipDriverGetVersion(int *version) {
    ENTER_OR_FAIL();
    *version = 60443484;
    return HIP_OK;
}
int hipRuntimeGetVersion(int *version) { return hipDriverGetVersion(version); }
int hipInit(unsigned flags) {
    ENTER_OR_FAIL();
    return flags ? HIP_INVALID_VALUE : HIP_OK;
}
int hipStreamBeginCapture(void *handle, int) {
    ENTER_OR_FAIL();
    stream *s = find_stream("hipStreamBeginCapture", handle);
    if (!s) return HIP_INVALID_HANDLE;
    if (!handle || s->capturing) {
        misuse("hipStreamBeginCapture on %s",
               handle ? "a stream that is being captured" : "the NULL stream");
        return HIP_CAPTURE_UNSUPPORTED;
    }
    s->capturing = true;
    s->invalid = false;
    s->capturer = pthread_self();
    return HIP_OK;
}
int hipStreamEndCapture(void *handle, void **graph) {
    ENTER();
    stream *s = find_stream("hipStreamEndCapture", handle);
    if (!s) return HIP_INVALID_HANDLE;
    *graph = nullptr;
    if (!s->capturing && failure) return failure;
    if (!s->capturing) {
        misuse("hipStreamEndCapture without a beginning");
        return HIP_INVALID_VALUE;
    }
    s->capturing = false;
    operations *g = new operations;
    g->swap(s->captured);
    if (failure || s->invalid) {
        delete g;
        return failure ? failure : HIP_CAPTURE_INVALIDATED;
    }
    hip().graphs.insert(g);
    *graph = g;
    return HIP_OK;
}
int hipGraphInstantiate(void **exec, void *graph, void **, char *, size_t) {
    ENTER_OR_FAIL();
    if (!hip().graphs.count((operations *)graph)) {
        misuse("hipGraphInstantiate: %p is not a graph", graph);
        return HIP_INVALID_HANDLE;
    }
    operations *e = new operations(*(operations *)graph);
    int node = 0;
    for (operation &o : *e) {
        if (o.what != operation::LAUNCH) continue;
        const bool hit = hip().replay_node < 0 || hip().replay_node == node++;
        const auto last = hip().last_args.find(o.kernel);
        if (!hit) continue;
        if (hip().replay == SIMT_REPLAY_STALE_ARGS && last != hip().last_args.end()) {
            o.args = last->second;
        }
        if (hip().replay == SIMT_REPLAY_DROPPED) o.what = operation::MARK; // of no event
    }
    hip().execs.insert(e);
    *exec = e;
    return HIP_OK;
}
int hipGraphDestroy(void *graph) {
    ENTER();
    const int error = destroy(hip().graphs, "hipGraphDestroy", graph);
    return failure ? failure : error;
}
int hipGraphExecDestroy(void *exec) {
    ENTER();
    for (const stream *s : hip().streams) {
        for (size_t i = s->done; i < s->queue.size(); i++) {
            if (s->queue[i].exec != exec) continue;
            misuse("hipGraphExecDestroy: %p is running", exec);
            break;
        }
    }
    const int error = destroy(hip().execs, "hipGraphExecDestroy", exec);
    return failure ? failure : error;
}
int hipGraphLaunch(void *exec, void *on) {
    ENTER_OR_FAIL();
    stream *s = find_stream("hipGraphLaunch", on);
    if (!s) return HIP_INVALID_HANDLE;
    if (!hip().execs.count((operations *)exec)) {
        misuse("hipGraphLaunch: %p is not an executable graph", exec);
        return HIP_INVALID_HANDLE;
    }
    int error = HIP_OK;
    operations nodes = *(operations *)exec;
    if (hip().replay == SIMT_REPLAY_STALE_COPIES) {
        operation o = {};
        o.what = operation::HIDE;
        nodes.insert(nodes.begin(), o);
        o.what = operation::SHOW;
        nodes.push_back(o);
    }
    for (operation o : nodes) {
        o.exec = exec;
        const int e = submit(s, o);
        if (!error) error = e;
    }
    return error;
}

int hipGraphUpload(void *exec, void *on) {
    ENTER_OR_FAIL();
    if (!find_stream("hipGraphUpload", on)) return HIP_INVALID_HANDLE;
    if (hip().execs.count((operations *)exec)) return HIP_OK;
    misuse("hipGraphUpload: %p is not an executable graph", exec);
    return HIP_INVALID_HANDLE;
}

int hipModuleLoadData(void **module, const void *image) {
    ENTER_OR_FAIL();
    if (!image) return HIP_INVALID_VALUE;
    if (hip().image_error) return hip().image_error;
    int *m = new int(0);
    hip().modules.insert(m);
    *module = m;
    return HIP_OK;
}
int hipModuleUnload(void *module) {
    ENTER();
    const int error = destroy(hip().modules, "hipModuleUnload", module);
    return failure ? failure : error;
}
int hipModuleGetFunction(void **function, void *module, const char *name) {
    ENTER_OR_FAIL();
    if (!hip().modules.count((int *)module)) {
        misuse("hipModuleGetFunction: %p is not a module", module);
        return HIP_INVALID_HANDLE;
    }
    simt_kernel *k = strncmp(name, "rocq_k_", 7) == 0 ? simt_find_name(name + 7) : nullptr;
    *function = k;
    return k ? HIP_OK : HIP_NOT_FOUND;
}
int hipModuleLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z,
                          unsigned block_x, unsigned block_y, unsigned block_z, unsigned lds,
                          void *on, void **args, void **extra) {
    ENTER_OR_FAIL();
    if (extra || block_y != 1 || block_z != 1) {
        misuse("hipModuleLaunchKernel: extra %p, blocks of %u by %u by %u", (void *)extra, block_x,
               block_y, block_z);
        return HIP_INVALID_VALUE;
    }
    return launch("hipModuleLaunchKernel", (simt_kernel *)function, grid_x, grid_y, grid_z, block_x,
                  lds, args ? args[0] : nullptr, on);
}
const char *hipGetErrorName(int error) {
    switch (error) {
    case HIP_OK: return "hipSuccess";
    case HIP_INVALID_VALUE: return "hipErrorInvalidValue";
    case HIP_OUT_OF_MEMORY: return "hipErrorOutOfMemory";
    case 100: return "hipErrorNoDevice";
    case HIP_INVALID_DEVICE: return "hipErrorInvalidDevice";
    case HIP_NO_BINARY: return "hipErrorNoBinaryForGpu";
    case HIP_INVALID_HANDLE: return "hipErrorInvalidHandle";
    case HIP_NOT_FOUND: return "hipErrorNotFound";
    case HIP_LAUNCH_FAILURE: return "hipErrorLaunchFailure";
    case HIP_CAPTURE_UNSUPPORTED: return "hipErrorStreamCaptureUnsupported";
    case HIP_CAPTURE_INVALIDATED: return "hipErrorStreamCaptureInvalidated";
    default: return "hipErrorUnknown";
    }
}

static int simt_linked_launch(const void *stub, unsigned grid_x, unsigned grid_z, unsigned threads,
                              unsigned lds, void *args, void *on) {
    ENTER_OR_FAIL();
    return launch("launch", (simt_kernel *)(uintptr_t)stub, grid_x, 1, grid_z, threads, lds, args,
                  on);
}

// ---------------------------------------------------------------------------------------------
// the table of linked programs, and the tests' controls
// ---------------------------------------------------------------------------------------------

static bool simt_optional = true;
static std::string simt_missing;

const rocq_hip *rocq_hip_linked(void) {
    static rocq_hip table;
    static const void *stubs[ROCQ_K_COUNT];
    const bool REQUIRED = true, MODULE = true, OPTIONAL = simt_optional;
#define ROCQ_X(need, field, symbol, parameters) \
    table.field = need && simt_missing != "hip" #symbol ? hip##symbol : nullptr;
    ROCQ_HIP_FUNCTIONS(ROCQ_X)
#undef ROCQ_X
    table.error_name = hipGetErrorName;
    table.launch = simt_linked_launch;
    int n = 0;
#define ROCQ_X(name, args, threads) stubs[n++] = simt_find_name(#name);
    ROCQ_KERNELS(ROCQ_X)
#undef ROCQ_X
    table.stubs = stubs;
    table.n_stubs = n;
    table.version = ROCQ_VERSION;
    return &table;
}

void simt_set_work(int when) { hip().work = when; }
static void simt_fail(int64_t n, int code, bool on) {
    runtime &r = hip();
    std::lock_guard<std::recursive_mutex> hold(r.lock);
    r.fail_at = n ? r.calls + n : 0;
    r.fail_code = code;
    r.fail_on = on;
    r.lost = false;
}
void simt_fail_at(int64_t n, int code) { simt_fail(n, code, true); }
void simt_fail_once(int64_t n, int code) { simt_fail(n, code, false); }
int64_t simt_calls(void) { return hip().calls; }

simt_live simt_get_live(void) {
    const runtime &r = hip();
    simt_live live = {};
    live.device_blocks = (int)r.device.size();
    live.host_blocks = (int)r.host.size();
    live.streams = (int)r.streams.size();
    live.events = (int)r.events.size();
    live.modules = (int)r.modules.size();
    live.graphs = (int)r.graphs.size();
    live.execs = (int)r.execs.size();
    for (auto &b : r.device) live.device_bytes += b.second.size;
    for (auto &b : r.host) live.host_bytes += b.second.size;
    return live;
}
int simt_live_sum(void) {
    const simt_live l = simt_get_live();
    return l.device_blocks + l.host_blocks + l.streams + l.events + l.modules + l.graphs + l.execs;
}

void simt_set_devices(int n) { hip().n_devices = n; }
void simt_set_memory(size_t bytes) { hip().memory = bytes; }
void simt_set_touching(size_t bytes) {
    runtime &r = hip();
    void *reserve;
    if (posix_memalign(&reserve, 256, bytes)) abort();
    r.reserve = (char *)reserve;
    r.reserved = bytes / 256 * 256;
    r.taken = 0;
}
void simt_set_image_error(int code) { hip().image_error = code; }
void simt_set_selftest_error(int word) { hip().selftest_error = word; }
void simt_set_optional(int there) { simt_optional = there != 0; }
void simt_set_missing(const char *name) { simt_missing = name ? name : ""; }
void simt_set_target(int target) { hip().target = target; }
void simt_set_clock(double (*ms)(void)) { hip().clock = ms; }
void simt_set_priorities(int least, int greatest) {
    hip().least = least;
    hip().greatest = greatest;
}
int simt_get_stream(simt_stream *s) {
    int64_t newest = 0;
    for (const stream *made : hip().streams) {
        if (made->number <= newest) continue;
        newest = made->number;
        *s = made->made;
    }
    return newest > 0;
}
int64_t simt_get_lds(const char *name) {
    const simt_kernel *k = simt_find_name(name);
    return k ? hip().lds[k] : -1;
}
void simt_set_elsewhere(const simt_elsewhere *to) {
    hip().elsewhere = to;
#define ROCQ_X(name, args, threads) \
    new simt_registered(#name, nullptr, sizeof(args), threads, nullptr);
    ROCQ_KERNELS(ROCQ_X)
#undef ROCQ_X
}
void simt_set_replay(int how, int node) {
    hip().replay = how;
    hip().replay_node = node;
    hip().unseen.clear();
    hip().last_args.clear();
}

int simt_error_count(void) { return simt_errors(); }
const char *simt_errors_text(void) { return simt_error_text(); }
void simt_forget_errors(void) { simt_clear_errors(); }

int64_t simt_launches(const char *name) {
    const simt_kernel *k = simt_find_name(name);
    return k ? k->launches : -1;
}
const char *simt_kernel_at(int index) {
    for (const simt_kernel *k = simt_kernels; k; k = k->next) {
        if (index-- == 0) return k->name;
    }
    return nullptr;
}

} // extern "C"
#pragma GCC visibility pop
