// Checks of a C test that many ranks run at once: each notes what fails on it, and a test ends on all of them alike. Needs cmocka,
// comm.h, and a `world`.
#ifndef ON_ALL_RANKS_H
#define ON_ALL_RANKS_H

static int failures;

#define check(condition)                                                                                       \
    do {                                                                                                       \
        if (!(condition) && failures++ < 3)                                                                    \
            fprintf(stderr, "%s:%d: rank %d of %d: %s\n", __FILE__, __LINE__, world->rank, world->size,        \
                    #condition);                                                                               \
    } while (0)

static void agree(void) {
    bool all = comm_all_true(world, failures == 0);
    failures = 0;
    assert_true(all);
}

#endif
