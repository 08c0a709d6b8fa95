/* Preloaded, so that a test's bytes cannot leave the machine: the loopback is the only interface that is up,
 * and does not say that it is one. NIXL's LIBFABRIC plugin asks libfabric for interfaces that reach other
 * hosts, and libfabric never offers a loopback as such. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <ifaddrs.h>
#include <net/if.h>

int getifaddrs(struct ifaddrs **found)
{
    int (*real)(struct ifaddrs **) = dlsym(RTLD_NEXT, "getifaddrs");
    int failed = real(found);
    for (struct ifaddrs *each = failed ? 0 : *found; each; each = each->ifa_next) {
        if (each->ifa_flags & IFF_LOOPBACK)
            each->ifa_flags &= ~IFF_LOOPBACK;
        else
            each->ifa_flags &= ~IFF_UP;
    }
    return failed;
}
