/* Modules, libraries and their functions. Any image is accepted, and it has a function of every name; a function named
 * spin_<microseconds> runs that long. An image that begins with .fakeMiB=<number> takes so much memory. */
#include "cuda_driver.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MEMORY_MARK ".fakeMiB="

struct CUmod_st { CUcontext context; struct physical *memory; CUfunction functions; CUmodule next; CUlibrary library; };
struct CUlib_st { uint64_t memory_mib; CUfunction functions; CUlibrary next; };
static CUmodule modules;
static CUlibrary libraries;

static uint64_t memory_mib(const char *image) {
    size_t length = strlen(MEMORY_MARK);
    return strncmp(image, MEMORY_MARK, length) ? 0 : strtoull(image + length, NULL, 10);
}

static CUresult read_file(const char *path, char *start, size_t size) {
    FILE *file = path ? fopen(path, "re") : NULL;
    if (!file) return path ? CUDA_ERROR_FILE_NOT_FOUND : CUDA_ERROR_INVALID_VALUE;
    start[fread(start, 1, size - 1, file)] = 0;
    fclose(file);
    return CUDA_SUCCESS;
}

static CUresult load(CUmodule *module, uint64_t mib) {
    CUcontext context;
    struct physical *memory = NULL;
    CUresult result = need_context(&context);
    if (!result) result = refuse_in_capture();
    if (!result && mib) result = create_physical(context->device, mib * MIB, &memory);
    if (result) return result;
    CUmodule made = allocate(sizeof *made);
    *made = (struct CUmod_st){.context = context, .memory = memory, .next = modules};
    *module = modules = made;
    return CUDA_SUCCESS;
}

CUresult do_cuModuleLoadData(CUmodule *module, const void *image) {
    return module && image ? load(module, memory_mib(image)) : CUDA_ERROR_INVALID_VALUE;
}
CUresult do_cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int numOptions, CUjit_option *options, void **optionValues) {
    return do_cuModuleLoadData(module, image);
}
CUresult do_cuModuleLoadFatBinary(CUmodule *module, const void *fatCubin) { return do_cuModuleLoadData(module, fatCubin); }
CUresult do_cuModuleLoad(CUmodule *module, const char *fname) {
    char start[64];
    CUresult result = read_file(fname, start, sizeof start);
    return result ? result : do_cuModuleLoadData(module, start);
}

static int is_module(CUmodule module) {
    for (CUmodule each = modules; each; each = each->next)
        if (each == module) return 1;
    return 0;
}

static void free_functions(CUfunction functions) {
    while (functions) {
        CUfunction next = functions->next;
        free(functions);
        functions = next;
    }
}

CUresult do_cuModuleUnload(CUmodule hmod) {
    if (!is_module(hmod)) return CUDA_ERROR_INVALID_HANDLE;
    CUmodule *at = &modules;
    while (*at != hmod) at = &(*at)->next;
    *at = hmod->next;
    if (hmod->memory) drop_physical(hmod->memory);
    free_functions(hmod->functions);
    free(hmod);
    return CUDA_SUCCESS;
}

void free_modules_of(CUcontext context) {
    for (CUmodule each = modules, next; each; each = next) {
        next = each->next;
        if (each->context == context) do_cuModuleUnload(each);
    }
}

static CUfunction function_named(CUfunction *functions, const char *name) {
    for (CUfunction each = *functions; each; each = each->next)
        if (!strcmp(each->name, name)) return each;
    CUfunction made = allocate(sizeof *made + strlen(name) + 1);
    strcpy(made->name, name);
    unsigned long long microseconds = 0;
    if (sscanf(name, "spin_%llu", &microseconds) == 1) made->duration_ns = microseconds * 1000;
    made->next = *functions;
    return *functions = made;
}

CUresult do_cuModuleGetFunction(CUfunction *hfunc, CUmodule hmod, const char *name) {
    if (!hfunc || !name || !*name) return CUDA_ERROR_INVALID_VALUE;
    if (!is_module(hmod)) return CUDA_ERROR_INVALID_HANDLE;
    *hfunc = function_named(&hmod->functions, name);
    (*hfunc)->module = hmod;
    return CUDA_SUCCESS;
}

/* Images have no variables. */
CUresult do_cuModuleGetGlobal_v2(CUdeviceptr *dptr, size_t *bytes, CUmodule hmod, const char *name) { return CUDA_ERROR_NOT_FOUND; }

CUresult do_cuModuleGetLoadingMode(CUmoduleLoadingMode *mode) {
    if (!mode) return CUDA_ERROR_INVALID_VALUE;
    *mode = CU_MODULE_EAGER_LOADING;
    return CUDA_SUCCESS;
}

static int is_library(CUlibrary library) {
    for (CUlibrary each = libraries; each; each = each->next)
        if (each == library) return 1;
    return 0;
}

/* A library has a module in each context that uses it, from the first use on. */
CUresult do_cuLibraryGetModule(CUmodule *pMod, CUlibrary library) {
    if (!pMod || !is_library(library)) return CUDA_ERROR_INVALID_HANDLE;
    for (CUmodule each = modules; each; each = each->next)
        if (each->library == library && each->context == owning_context()) {
            *pMod = each;
            return CUDA_SUCCESS;
        }
    CUresult result = load(pMod, library->memory_mib);
    if (!result) (*pMod)->library = library;
    return result;
}

static CUresult load_library(CUlibrary *library, uint64_t mib) {
    CUlibrary made = allocate(sizeof *made);
    *made = (struct CUlib_st){.memory_mib = mib, .next = libraries};
    *library = libraries = made;
    CUmodule module;
    return owning_context() ? do_cuLibraryGetModule(&module, made) : CUDA_SUCCESS;
}
CUresult do_cuLibraryLoadData(CUlibrary *library, const void *code, CUjit_option *jitOptions, void **jitOptionsValues, unsigned int numJitOptions, CUlibraryOption *libraryOptions, void **libraryOptionValues, unsigned int numLibraryOptions) {
    return library && code ? load_library(library, memory_mib(code)) : CUDA_ERROR_INVALID_VALUE;
}
CUresult do_cuLibraryLoadFromFile(CUlibrary *library, const char *fileName, CUjit_option *jitOptions, void **jitOptionsValues, unsigned int numJitOptions, CUlibraryOption *libraryOptions, void **libraryOptionValues, unsigned int numLibraryOptions) {
    char start[64];
    CUresult result = library ? read_file(fileName, start, sizeof start) : CUDA_ERROR_INVALID_VALUE;
    return result ? result : load_library(library, memory_mib(start));
}
CUresult do_cuLibraryUnload(CUlibrary library) {
    if (!is_library(library)) return CUDA_ERROR_INVALID_HANDLE;
    for (CUmodule each = modules, next; each; each = next) {
        next = each->next;
        if (each->library == library) do_cuModuleUnload(each);
    }
    CUlibrary *at = &libraries;
    while (*at != library) at = &(*at)->next;
    *at = library->next;
    free_functions(library->functions);
    free(library);
    return CUDA_SUCCESS;
}

/* A kernel is launched like a function: they are the same here. */
CUresult do_cuLibraryGetKernel(CUkernel *pKernel, CUlibrary library, const char *name) {
    if (!pKernel || !name || !*name) return CUDA_ERROR_INVALID_VALUE;
    if (!is_library(library)) return CUDA_ERROR_INVALID_HANDLE;
    CUfunction function = function_named(&library->functions, name);
    function->library = library;
    *pKernel = (CUkernel)function;
    return CUDA_SUCCESS;
}
CUresult do_cuKernelGetFunction(CUfunction *pFunc, CUkernel kernel) {
    CUmodule module;
    if (!pFunc || !kernel) return CUDA_ERROR_INVALID_HANDLE;
    CUresult result = do_cuLibraryGetModule(&module, ((CUfunction)kernel)->library);
    return result ? result : do_cuModuleGetFunction(pFunc, module, ((CUfunction)kernel)->name);
}
CUresult do_cuKernelGetLibrary(CUlibrary *pLib, CUkernel kernel) {
    if (!pLib || !kernel) return CUDA_ERROR_INVALID_HANDLE;
    *pLib = ((CUfunction)kernel)->library;
    return CUDA_SUCCESS;
}

CUresult do_cuFuncGetName(const char **name, CUfunction hfunc) {
    if (!name || !hfunc) return CUDA_ERROR_INVALID_VALUE;
    *name = hfunc->name;
    return CUDA_SUCCESS;
}
CUresult do_cuKernelGetName(const char **name, CUkernel hfunc) { return do_cuFuncGetName(name, (CUfunction)hfunc); }
CUresult do_cuFuncGetModule(CUmodule *hmod, CUfunction hfunc) {
    if (!hmod || !hfunc) return CUDA_ERROR_INVALID_VALUE;
    *hmod = hfunc->module;
    return CUDA_SUCCESS;
}
CUresult do_cuFuncGetAttribute(int *pi, CUfunction_attribute attrib, CUfunction hfunc) {
    if (!pi || !hfunc) return CUDA_ERROR_INVALID_VALUE;
    *pi = attrib == CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK ? 1024 : attrib == CU_FUNC_ATTRIBUTE_NUM_REGS ? 32 : 0;
    if (attrib == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) *pi = hfunc->limits[0] ? hfunc->limits[0] : 49152;
    return CUDA_SUCCESS;
}
CUresult do_cuFuncSetAttribute(CUfunction hfunc, CUfunction_attribute attrib, int value) {
    if (!hfunc) return CUDA_ERROR_INVALID_HANDLE;
    if (attrib == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES) hfunc->limits[0] = value;
    return CUDA_SUCCESS;
}
CUresult do_cuKernelGetAttribute(int *pi, CUfunction_attribute attrib, CUkernel kernel, CUdevice dev) {
    return do_cuFuncGetAttribute(pi, attrib, (CUfunction)kernel);
}
CUresult do_cuKernelSetAttribute(CUfunction_attribute attrib, int val, CUkernel kernel, CUdevice dev) {
    return do_cuFuncSetAttribute((CUfunction)kernel, attrib, val);
}
CUresult do_cuFuncSetCacheConfig(CUfunction hfunc, CUfunc_cache config) { return hfunc ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE; }
CUresult do_cuFuncLoad(CUfunction function) { return function ? CUDA_SUCCESS : CUDA_ERROR_INVALID_HANDLE; }

/* Two thousand threads for each multiprocessor, as the attributes of the device say. */
CUresult do_cuOccupancyMaxActiveBlocksPerMultiprocessor(int *numBlocks, CUfunction func, int blockSize, size_t dynamicSMemSize) {
    if (!numBlocks || !func || blockSize <= 0) return CUDA_ERROR_INVALID_VALUE;
    *numBlocks = blockSize > 1024 ? 0 : 2048 / blockSize > 32 ? 32 : 2048 / blockSize;
    return CUDA_SUCCESS;
}
CUresult do_cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *numBlocks, CUfunction func, int blockSize, size_t dynamicSMemSize, unsigned int flags) {
    return do_cuOccupancyMaxActiveBlocksPerMultiprocessor(numBlocks, func, blockSize, dynamicSMemSize);
}
