// Linear layers over weights packed in panels.
#include "common.h"

using namespace quire;

constexpr int PANEL = 2 * VF;  // outputs side by side: two registers

QUIRE_API int quire_panel() { return PANEL; }
