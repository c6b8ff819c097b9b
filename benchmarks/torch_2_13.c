/* Four functions of torch 2.13's stable ABI, for torch 2.11.

   The compiled library of vllm-gguf-plugin 0.0.5 needs them, but vLLM 0.24 needs torch 2.11. benchmarks.engines preloads
   this library into the plugin's engine. Contracts: torch/csrc/stable/c/shim.h of torch 2.13. */

#include <stdint.h>
#include <stdlib.h>

/* A StableIValue is a word. torch 2.11 frees it by `delete`, which is free() in glibc. */
int32_t torch_new_stable_ivalue(uint64_t **value)
{
    *value = calloc(1, sizeof **value);
    return *value == NULL;
}

int32_t torch_delete_stable_ivalue(uint64_t *value)
{
    free(value);
    return value == NULL;
}

const char *torch_exception_get_what(void)
{
    return "torch 2.11 keeps no message";
}

const char *torch_exception_get_what_without_backtrace(void)
{
    return torch_exception_get_what();
}
