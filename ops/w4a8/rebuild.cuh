// The rebuilt weight, four values at a time.

#pragma once

// Four values w8' = w4 * s2 - z * s2 of one channel. Each plus 128 is a digit 0..255 of a number to the base 256, so
// one multiply-add of whole words is exact in every byte, whatever carries pass between them on the way; flipping the
// top bits takes the 128 off again. `offset` is rebuild_offset(s2, z).
__device__ __forceinline__ unsigned rebuild(unsigned codes, unsigned scale, unsigned offset) {
    return (codes * scale + offset) ^ 0x80808080u;
}

// 128 - z * s2 in every byte.
__device__ __forceinline__ unsigned rebuild_offset(unsigned scale, unsigned zero) {
    return (128 - zero * scale) * 0x01010101u;
}
