/* The blocks in which linear layers are computed. */
#ifndef DYNATREE_LINEAR_H
#define DYNATREE_LINEAR_H

#include "kernels.h"

#define ROWS 6            /* rows multiplied together; with ACROSS vectors each, they fill the registers */
#define PANEL 64          /* features of a panel; a multiple of ACROSS * LANES */
#define CHUNK (16 * ROWS) /* rows whose sums stay in the L1 cache */
#define BLOCK (16 * 1024) /* bytes of a block of weights */
#define AHEAD 2048        /* prefetch distance in bytes, if a panel is read once from end to end */
#define TILE_ROWS 16      /* most rows of one of AMX's tiles */
#define TILE_LEAST_8 3    /* rows from which on AMX is faster than VNNI, with codes of 8 bits */
#define TILE_LEAST_4 5    /* and of 4 bits, which are expanded */
#define TILE_INPUTS 256   /* inputs that AMX multiplies together; a multiple of each group and `super` */
#define FARTHER 8192      /* further prefetch distance in bytes of AMX's weights */

/* Vectors of a panel that are multiplied with `rows` rows at a time: as many as the registers hold. */
INLINE int across(int rows) { return LANES == 16 ? ACROSS : rows == 1 ? 4 * ACROSS : rows < 4 ? 2 * ACROSS : ACROSS; }

#endif
