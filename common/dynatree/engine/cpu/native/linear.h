/* The blocks in which linear layers are computed. */
#ifndef DYNATREE_LINEAR_H
#define DYNATREE_LINEAR_H

#include "kernels.h"

#define ROWS 6              /* of a block: with ACROSS vectors each, they fill the registers */
#define PANEL 64            /* features; a multiple of ACROSS * LANES */
#define CHUNK (16 * ROWS)   /* rows whose sums stay in the nearest cache */
#define BLOCK (16 * 1024)   /* bytes of a panel that are read at a time */
#define AHEAD 2048          /* bytes that are asked for in advance where memory is all that counts */
#define QUANTIZED_BLOCK 32 /* inputs of a row that share a scale */

/* How many vectors of a panel meet `rows` at a time: as many as the registers hold. */
INLINE int across(int rows) { return LANES == 16 ? ACROSS : rows == 1 ? 4 * ACROSS : rows < 4 ? 2 * ACROSS : ACROSS; }

#endif
