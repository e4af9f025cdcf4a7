// Arrays in a folder, for programs that run kernels of the twin: NAME.bin each. A program ends with 3 when one is missing.
#pragma once
#include "ptx.cuh"

inline std::string folder;

struct Memory {
    std::vector<char> bytes;
    char* at;
    explicit Memory(size_t size) : bytes(size + 128), at(reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(bytes.data()) + 127) / 128 * 128)) {}
    uint64_t ptr() const { return reinterpret_cast<uintptr_t>(at); }
    size_t size() const { return bytes.size() - 128; }
};
inline FILE* opened(const std::string& name, const char* mode) {
    FILE* file = fopen((folder + "/" + name + ".bin").c_str(), mode);
    return file ? file : (exit(3), nullptr);
}
inline Memory read(const std::string& name) {
    FILE* file = opened(name, "rb");
    fseek(file, 0, SEEK_END);
    Memory memory(ftell(file));
    rewind(file);
    if (fread(memory.at, 1, memory.size(), file) != memory.size()) exit(3);
    fclose(file);
    return memory;
}
inline bool read_if_there(const std::string& name, const Memory& memory) {
    FILE* file = fopen((folder + "/" + name + ".bin").c_str(), "rb");
    if (!file) return false;
    if (fread(memory.at, 1, memory.size(), file) != memory.size()) exit(3);
    fclose(file);
    return true;
}
inline void write(const std::string& name, const Memory& memory) {
    FILE* file = opened(name, "wb");
    if (fwrite(memory.at, 1, memory.size(), file) != memory.size()) exit(3);
    fclose(file);
}
