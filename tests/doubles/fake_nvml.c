/* A double of NVIDIA's libnvidia-ml.so.1: it says what the file nvml.txt beside it says, or the one that FAKE_NVML names.
 *
 *   driver VERSION            gpus N
 *   lost GPU                  its handle cannot be had
 *   error FUNCTION GPU CODE   what a function returns for a GPU (0 for those that are about none)
 *   hang FUNCTION             it never returns         crash FUNCTION   it dies of SIGSEGV
 *   noise                     it prints to stdout when it is initialised
 *   remapped GPU CORRECTABLE UNCORRECTABLE PENDING FAILED
 *   retired GPU               a page waits for its retirement
 *   recovery GPU ACTION       NVML_FI_DEV_GET_GPU_RECOVERY_ACTION
 *   ecc GPU VOLATILE AGGREGATE
 *   throttle GPU BITS         inactive GPU LINK         process GPU PID BYTES
 *   nvlink GPU COUNT          of each of the four total error fields
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

enum { OK = 0, INVALID_ARGUMENT = 2, NOT_SUPPORTED = 3, INSUFFICIENT_SIZE = 7, GPU_IS_LOST = 15, LINKS = 18 };

typedef struct {
    char legacy[16];
    unsigned domain, bus, device, id, subsystem;
    char bus_id[32];
} Pci;
typedef struct { unsigned long long total, free, used; } Memory;
typedef struct { unsigned pid; unsigned long long used; unsigned gpu_instance, compute_instance; } Process;
typedef struct {
    uint32_t field, scope;
    int64_t timestamp, latency;
    uint32_t type, result;
    union { double d; unsigned u; unsigned long long ull; } value;
} Field;

static FILE *told(void) {
    const char *path = getenv("FAKE_NVML");
    static char own[4096];
    Dl_info found;
    if (path == NULL && dladdr((void *)told, &found) != 0) {
        snprintf(own, sizeof own, "%s", found.dli_fname);
        char *slash = strrchr(own, '/');
        snprintf(slash == NULL ? own : slash + 1, 16, "nvml.txt");
        path = own;
    }
    return path == NULL ? NULL : fopen(path, "r");
}

/* Whether a line says `word GPU [a b c d]`; a later line counts more. */
static int says(const char *word, int gpu, long long values[4]) {
    char line[256], first[64];
    int found = 0, number;
    FILE *file = told();
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        long long read[4] = {0, 0, 0, 0};
        if (sscanf(line, "%63s %d %lld %lld %lld %lld", first, &number, &read[0], &read[1], &read[2], &read[3]) >= 2
            && strcmp(first, word) == 0 && number == gpu) {
            found = 1;
            memcpy(values, read, sizeof read);
        }
    }
    if (file != NULL) fclose(file);
    return found;
}

static int enter(const char *function, int gpu) {
    char line[256], word[64], name[128];
    int number, code, result = OK;
    FILE *file = told();
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        if (sscanf(line, "%63s %127s %d %d", word, name, &number, &code) < 2 || strcmp(name, function) != 0) continue;
        if (strcmp(word, "hang") == 0) for (;;) pause();
        if (strcmp(word, "crash") == 0) raise(SIGSEGV);
        if (strcmp(word, "error") == 0 && number == gpu) result = code;
    }
    if (file != NULL) fclose(file);
    return result;
}

#define GPU(handle) ((int)(intptr_t)(handle) - 1)
#define ENTER(gpu) do { int result_ = enter(__func__, gpu); if (result_ != OK) return result_; } while (0)

static int text(const char *word, char *buffer, unsigned size, const char *otherwise) {
    char line[256], first[64], value[128];
    FILE *file = told();
    snprintf(buffer, size, "%s", otherwise);
    while (file != NULL && fgets(line, sizeof line, file) != NULL)
        if (sscanf(line, "%63s %127s", first, value) == 2 && strcmp(first, word) == 0) snprintf(buffer, size, "%s", value);
    if (file != NULL) fclose(file);
    return OK;
}

int nvmlInitWithFlags(unsigned flags) {
    char line[256];
    FILE *file = told();
    while (file != NULL && fgets(line, sizeof line, file) != NULL)
        if (strncmp(line, "noise", 5) == 0) { printf("{\"noise\": 1}\nmore noise\n"); fflush(stdout); }
    if (file != NULL) fclose(file);
    ENTER(0);
    return OK;
}
int nvmlShutdown(void) { return OK; }
const char *nvmlErrorString(int code) { return code == GPU_IS_LOST ? "GPU is lost" : "an error"; }
int nvmlSystemGetDriverVersion(char *buffer, unsigned size) { ENTER(0); return text("driver", buffer, size, "570.0"); }
int nvmlSystemGetNVMLVersion(char *buffer, unsigned size) { ENTER(0); return text("nvml", buffer, size, "13.570.0"); }
int nvmlDeviceGetCount_v2(unsigned *count) {
    char number[16];
    ENTER(0);
    text("gpus", number, sizeof number, "0");
    *count = (unsigned)atoi(number);
    return OK;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **handle) {
    long long values[4];
    ENTER((int)index);
    if (says("lost", (int)index, values)) return GPU_IS_LOST;
    *handle = (void *)(intptr_t)(index + 1);
    return OK;
}
int nvmlDeviceGetUUID(void *gpu, char *buffer, unsigned size) { ENTER(GPU(gpu)); snprintf(buffer, size, "GPU-fake-%d", GPU(gpu)); return OK; }
int nvmlDeviceGetName(void *gpu, char *buffer, unsigned size) { ENTER(GPU(gpu)); snprintf(buffer, size, "NVIDIA Fake H100"); return OK; }
int nvmlDeviceGetPciInfo_v3(void *gpu, Pci *pci) {
    ENTER(GPU(gpu));
    memset(pci, 0, sizeof *pci);
    pci->bus = 5 + (unsigned)GPU(gpu);
    snprintf(pci->bus_id, sizeof pci->bus_id, "00000000:%02X:00.0", pci->bus);
    return OK;
}
int nvmlDeviceGetMemoryInfo(void *gpu, Memory *memory) {
    ENTER(GPU(gpu));
    memory->total = 80ULL << 30;
    memory->used = 1ULL << 30;
    memory->free = memory->total - memory->used;
    return OK;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *gpu, unsigned *count, Process *processes) {
    char line[256], word[64];
    int number;
    unsigned pid, found = 0, room = processes == NULL ? 0 : *count;
    unsigned long long used;
    ENTER(GPU(gpu));
    FILE *file = told();
    while (file != NULL && fgets(line, sizeof line, file) != NULL) {
        if (sscanf(line, "%63s %d %u %llu", word, &number, &pid, &used) == 4 && strcmp(word, "process") == 0 && number == GPU(gpu)) {
            if (found < room) processes[found] = (Process){pid, used, 0xFFFFFFFF, 0xFFFFFFFF};
            found++;
        }
    }
    if (file != NULL) fclose(file);
    *count = found;
    return found > room ? INSUFFICIENT_SIZE : OK;
}
int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *gpu, unsigned *count, Process *processes) { ENTER(GPU(gpu)); *count = 0; return OK; }
int nvmlDeviceGetTotalEccErrors(void *gpu, unsigned kind, unsigned counter, unsigned long long *count) {
    long long values[4] = {0, 0, 0, 0};
    ENTER(GPU(gpu));
    says("ecc", GPU(gpu), values);
    *count = kind == 1 ? (unsigned long long)values[counter == 0 ? 0 : 1] : 0;
    return OK;
}
int nvmlDeviceGetRetiredPagesPendingStatus(void *gpu, unsigned *pending) {
    long long values[4];
    ENTER(GPU(gpu));
    *pending = (unsigned)says("retired", GPU(gpu), values);
    return OK;
}
static unsigned long long reasons(int gpu) {
    long long values[4] = {0, 0, 0, 0};
    says("throttle", gpu, values);
    return (unsigned long long)values[0];
}
#ifdef OLD
int nvmlDeviceGetCurrentClocksThrottleReasons(void *gpu, unsigned long long *bits) { ENTER(GPU(gpu)); *bits = reasons(GPU(gpu)); return OK; }
#else
int nvmlDeviceGetCurrentClocksEventReasons(void *gpu, unsigned long long *bits) { ENTER(GPU(gpu)); *bits = reasons(GPU(gpu)); return OK; }
int nvmlDeviceGetRemappedRows(void *gpu, unsigned *correctable, unsigned *uncorrectable, unsigned *pending, unsigned *failed) {
    long long values[4] = {0, 0, 0, 0};
    ENTER(GPU(gpu));
    says("remapped", GPU(gpu), values);
    *correctable = (unsigned)values[0];
    *uncorrectable = (unsigned)values[1];
    *pending = (unsigned)values[2];
    *failed = (unsigned)values[3];
    return OK;
}
#endif
int nvmlDeviceGetTemperature(void *gpu, unsigned sensor, unsigned *celsius) { ENTER(GPU(gpu)); *celsius = 41; return OK; }
int nvmlDeviceGetPcieReplayCounter(void *gpu, unsigned *count) { ENTER(GPU(gpu)); *count = 0; return OK; }
int nvmlDeviceGetNvLinkState(void *gpu, unsigned link, unsigned *active) {
    char line[256], word[64];
    int number;
    unsigned which;
    ENTER(GPU(gpu));
    if (link >= LINKS) return INVALID_ARGUMENT;
    *active = 1;
    FILE *file = told();
    while (file != NULL && fgets(line, sizeof line, file) != NULL)
        if (sscanf(line, "%63s %d %u", word, &number, &which) == 3 && strcmp(word, "inactive") == 0 && number == GPU(gpu) && which == link)
            *active = 0;
    if (file != NULL) fclose(file);
    return OK;
}
int nvmlDeviceGetFieldValues(void *gpu, int count, Field *fields) {
    ENTER(GPU(gpu));
    for (int index = 0; index < count; index++) {
        Field *field = &fields[index];
        long long values[4] = {0, 0, 0, 0};
        field->result = OK;
        if (field->field == 230) {
            says("recovery", GPU(gpu), values);
            field->type = 1;
            field->value.u = (unsigned)values[0];
        } else if (field->field == 38 || field->field == 45 || field->field == 52 || field->field == 59) {
            says("nvlink", GPU(gpu), values);
            field->type = 3;
            field->value.ull = (unsigned long long)values[0];
        } else {
            field->result = NOT_SUPPORTED;
        }
#ifdef OLD
        if (field->field == 230) field->result = INVALID_ARGUMENT;
#endif
    }
    return OK;
}
