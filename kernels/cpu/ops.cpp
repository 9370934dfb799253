// The element-wise steps between a decoder's matrix products.
#include <omp.h>

#include "common.h"

using namespace quire;

QUIRE_API int quire_vector_floats() { return VF; }

// How many threads a parallel region gets, for the test that torch's setting governs them.
QUIRE_API int quire_threads() {
    int threads = 0;
#pragma omp parallel
    {
#pragma omp single
        threads = omp_get_num_threads();
    }
    return threads;
}
