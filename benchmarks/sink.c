/* A small, fast SMTP sink for benchmarks: takes everything, keeps nothing, counts.
 *
 *   cc -O2 -o sink sink.c                              plain
 *   cc -O2 -DWITH_TLS -o sink sink.c -lssl -lcrypto    with implicit TLS (-t CERTIFICATE -k KEY)
 *
 *   sink [-p PORT] [-d DELAY_MS] [-n] [-b] [-t CERTIFICATE -k KEY]
 *     -p   port on 127.0.0.1; 0 (default) lets the kernel choose
 *     -d   hold every reply back so long: models a round trip's latency, neither a congestion window nor bandwidth
 *     -n   do not offer PIPELINING        -b   do not offer CHUNKING
 *
 * Prints "port N" when it listens and "messages N bytes N connections N" on SIGTERM. One thread, epoll, level-triggered.
 * Why: Postfix's smtp-sink costs 200 microseconds a message of 20 KB, and is then what a benchmark measures.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>
#ifdef WITH_TLS
#include <openssl/err.h>
#include <openssl/ssl.h>
static SSL_CTX *tls;
#endif

#define READ_SIZE (256 * 1024)
#define KEEP 4096 /* longest command kept between reads */

enum state { COMMANDS, CONTENT, CHUNK };

struct connection {
    int fd;
    enum state state;
    int last_chunk; /* BDAT LAST */
    int quitting;
    uint64_t chunk_left;
    size_t kept; /* bytes of an unfinished command or of a possible end of content */
    char keep[KEEP];
    char *out;
    size_t out_used, out_size;
#ifdef WITH_TLS
    SSL *ssl;
#endif
};

/* Replies held back, oldest first: the delay is the same for all. */
struct held {
    uint64_t due_ns;
    struct connection *to;
    int fd;
    size_t length;
    struct held *next;
    char text[];
};

static uint64_t messages, bytes, connections;
static uint64_t delay_ns;
static int offer_pipelining = 1, offer_chunking = 1;
static volatile sig_atomic_t stopping;
static struct held *first_held, *last_held;
static struct connection *by_fd[65536];
static int poller;

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void stop(int signal_number) {
    (void)signal_number;
    stopping = 1;
}

static void drop(struct connection *c) {
    by_fd[c->fd] = NULL;
#ifdef WITH_TLS
    if (c->ssl) SSL_free(c->ssl);
#endif
    close(c->fd);
    free(c->out);
    free(c);
}

static void say(struct connection *c, const char *text) {
    size_t length = strlen(text);
    if (c->out_used + length > c->out_size) {
        c->out_size = (c->out_used + length) * 2 + 256;
        c->out = realloc(c->out, c->out_size);
    }
    memcpy(c->out + c->out_used, text, length);
    c->out_used += length;
}

static void transmit(struct connection *c, const char *text, size_t length) {
#ifdef WITH_TLS
    if (c->ssl) {
        if (SSL_write(c->ssl, text, (int)length) <= 0) ERR_clear_error();
        return;
    }
#endif
    /* Replies are short; a client that does not read them is no client of a benchmark. */
    while (length > 0) {
        ssize_t sent = send(c->fd, text, length, MSG_NOSIGNAL);
        if (sent < 0) {
            if (errno == EAGAIN || errno == EINTR) continue;
            return;
        }
        text += sent;
        length -= (size_t)sent;
    }
}

static void flush(struct connection *c) {
    if (c->out_used == 0) return;
    if (delay_ns == 0) {
        transmit(c, c->out, c->out_used);
    } else {
        struct held *h = malloc(sizeof *h + c->out_used);
        h->due_ns = now_ns() + delay_ns;
        h->to = c;
        h->fd = c->fd;
        h->length = c->out_used;
        h->next = NULL;
        memcpy(h->text, c->out, c->out_used);
        if (last_held) last_held->next = h;
        else first_held = h;
        last_held = h;
    }
    c->out_used = 0;
}

static int starts(const char *line, size_t length, const char *word) {
    size_t n = strlen(word);
    return length >= n && strncasecmp(line, word, n) == 0;
}

static void command(struct connection *c, const char *line, size_t length) {
    if (starts(line, length, "MAIL") || starts(line, length, "RSET") || starts(line, length, "NOOP"))
        say(c, "250 2.0.0 Ok\r\n");
    else if (starts(line, length, "RCPT"))
        say(c, "250 2.1.5 Ok\r\n");
    else if (starts(line, length, "DATA")) {
        c->state = CONTENT;
        /* An empty content's dot may come first: pretend that a line has just ended. */
        memcpy(c->keep, "\r\n", 2);
        c->kept = 2;
        say(c, "354 End data with <CR><LF>.<CR><LF>\r\n");
    } else if (starts(line, length, "BDAT") && offer_chunking) {
        char *end;
        c->chunk_left = strtoull(line + 4, &end, 10);
        c->last_chunk = memmem(line, length, "LAST", 4) != NULL || memmem(line, length, "last", 4) != NULL;
        c->state = CHUNK;
    } else if (starts(line, length, "EHLO")) {
        say(c, "250-sink.test\r\n");
        if (offer_pipelining) say(c, "250-PIPELINING\r\n");
        if (offer_chunking) say(c, "250-CHUNKING\r\n");
        say(c, "250-8BITMIME\r\n250-ENHANCEDSTATUSCODES\r\n250 SIZE 104857600\r\n");
    } else if (starts(line, length, "HELO"))
        say(c, "250 sink.test\r\n");
    else if (starts(line, length, "QUIT")) {
        say(c, "221 2.0.0 Bye\r\n");
        c->quitting = 1;
    } else
        say(c, "500 5.5.2 What?\r\n");
}

static void taken(struct connection *c) {
    messages++;
    c->state = COMMANDS;
    say(c, "250 2.0.0 Ok: queued as SINK\r\n");
}

/* All of `data`; what is unfinished stays in `keep`. */
static void hear(struct connection *c, char *data, size_t length) {
    static char joined[READ_SIZE + KEEP];
    if (c->kept > 0) {
        memcpy(joined, c->keep, c->kept);
        memcpy(joined + c->kept, data, length);
        data = joined;
        length += c->kept;
        c->kept = 0;
    }
    while (length > 0) {
        if (c->state == CHUNK) {
            size_t part = length < c->chunk_left ? length : (size_t)c->chunk_left;
            data += part;
            length -= part;
            bytes += part;
            c->chunk_left -= part;
            if (c->chunk_left > 0) return;
            if (c->last_chunk) taken(c);
            else {
                c->state = COMMANDS;
                say(c, "250 2.0.0 Ok\r\n");
            }
        } else if (c->state == CONTENT) {
            char *end = memmem(data, length, "\r\n.\r\n", 5);
            if (end == NULL) {
                size_t tail = length < 4 ? length : 4;
                bytes += length - tail;
                memcpy(c->keep, data + length - tail, tail);
                c->kept = tail;
                return;
            }
            size_t part = (size_t)(end - data) + 5;
            data += part;
            length -= part;
            bytes += part;
            taken(c);
        } else {
            char *end = memchr(data, '\n', length);
            if (end == NULL) {
                if (length > KEEP) length = KEEP;
                memcpy(c->keep, data, length);
                c->kept = length;
                return;
            }
            size_t line = (size_t)(end - data);
            command(c, data, line);
            data += line + 1;
            length -= line + 1;
            if (c->state == CONTENT && c->kept > 0 && length > 0) {
                /* The pretended line end joins what already follows. */
                memmove(joined + 2, data, length);
                memcpy(joined, "\r\n", 2);
                data = joined;
                length += 2;
                c->kept = 0;
            }
        }
    }
    /* A chunk of no bytes is complete with its command. */
    if (c->state == CHUNK && c->chunk_left == 0 && c->last_chunk) taken(c);
}

static void release_held(void) {
    uint64_t now = now_ns();
    while (first_held && first_held->due_ns <= now) {
        struct held *h = first_held;
        first_held = h->next;
        if (!first_held) last_held = NULL;
        if (by_fd[h->fd] == h->to) {
            transmit(h->to, h->text, h->length);
            if (h->to->quitting) {
                struct held *later = first_held;
                while (later && later->to != h->to) later = later->next;
                if (!later) drop(h->to);
            }
        }
        free(h);
    }
}

static void accept_all(int listener) {
    for (;;) {
        int fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK | SOCK_CLOEXEC);
        if (fd < 0) return;
        if (fd >= 65536) {
            close(fd);
            continue;
        }
        int one = 1;
        setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
        struct connection *c = calloc(1, sizeof *c);
        c->fd = fd;
        by_fd[fd] = c;
        connections++;
        struct epoll_event e = {.events = EPOLLIN, .data.ptr = c};
        epoll_ctl(poller, EPOLL_CTL_ADD, fd, &e);
#ifdef WITH_TLS
        if (tls) {
            c->ssl = SSL_new(tls);
            SSL_set_fd(c->ssl, fd);
            SSL_set_accept_state(c->ssl);
            continue; /* the greeting follows the handshake */
        }
#endif
        say(c, "220 sink.test ESMTP\r\n");
        flush(c);
    }
}

static int readable(struct connection *c) {
    static char buffer[READ_SIZE];
    ssize_t got;
#ifdef WITH_TLS
    if (c->ssl) {
        if (!SSL_is_init_finished(c->ssl)) {
            int done = SSL_do_handshake(c->ssl);
            if (done <= 0) {
                int why = SSL_get_error(c->ssl, done);
                ERR_clear_error();
                return why == SSL_ERROR_WANT_READ || why == SSL_ERROR_WANT_WRITE;
            }
            say(c, "220 sink.test ESMTP\r\n");
            flush(c);
        }
        size_t filled = 0;
        int part = 0;
        while (filled < sizeof buffer && (part = SSL_read(c->ssl, buffer + filled, (int)(sizeof buffer - filled))) > 0)
            filled += (size_t)part;
        int why = part > 0 ? SSL_ERROR_NONE : SSL_get_error(c->ssl, part); /* before anything else is written */
        ERR_clear_error();
        if (filled > 0) {
            hear(c, buffer, filled);
            flush(c);
        }
        if (part > 0) return readable(c);
        return !(c->quitting && delay_ns == 0) && (why == SSL_ERROR_WANT_READ || why == SSL_ERROR_WANT_WRITE);
    }
#endif
    got = recv(c->fd, buffer, sizeof buffer, 0);
    if (got < 0) return errno == EAGAIN || errno == EINTR;
    if (got == 0) return 0;
    hear(c, buffer, (size_t)got);
    flush(c);
    return !(c->quitting && delay_ns == 0);
}

int main(int argc, char **argv) {
    int port = 0, option;
    const char *certificate = NULL, *key = NULL;
    while ((option = getopt(argc, argv, "p:d:nbt:k:")) != -1) {
        switch (option) {
        case 'p': port = atoi(optarg); break;
        case 'd': delay_ns = (uint64_t)(atof(optarg) * 1e6); break;
        case 'n': offer_pipelining = 0; break;
        case 'b': offer_chunking = 0; break;
        case 't': certificate = optarg; break;
        case 'k': key = optarg; break;
        default: return 2;
        }
    }
    if (certificate) {
#ifdef WITH_TLS
        tls = SSL_CTX_new(TLS_server_method());
        if (SSL_CTX_use_certificate_chain_file(tls, certificate) != 1 ||
            SSL_CTX_use_PrivateKey_file(tls, key ? key : certificate, SSL_FILETYPE_PEM) != 1) {
            fprintf(stderr, "cannot use %s\n", certificate);
            return 1;
        }
#else
        (void)key;
        fprintf(stderr, "compiled without TLS\n");
        return 1;
#endif
    }
    signal(SIGPIPE, SIG_IGN);
    struct sigaction act = {.sa_handler = stop};
    sigaction(SIGTERM, &act, NULL);
    sigaction(SIGINT, &act, NULL);
    int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0), one = 1;
    setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port)};
    inet_pton(AF_INET, "127.0.0.1", &at.sin_addr);
    socklen_t size = sizeof at;
    if (bind(listener, (struct sockaddr *)&at, sizeof at) < 0 || listen(listener, 4096) < 0) {
        perror("sink");
        return 1;
    }
    getsockname(listener, (struct sockaddr *)&at, &size);
    printf("port %d\n", ntohs(at.sin_port));
    fflush(stdout);
    poller = epoll_create1(EPOLL_CLOEXEC);
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = NULL};
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &e);
    struct epoll_event events[512];
    while (!stopping) {
        int wait_ms = -1;
        if (first_held) {
            uint64_t now = now_ns();
            wait_ms = first_held->due_ns <= now ? 0 : (int)((first_held->due_ns - now + 999999) / 1000000);
        }
        int count = epoll_wait(poller, events, 512, wait_ms);
        for (int i = 0; i < count; i++) {
            struct connection *c = events[i].data.ptr;
            if (c == NULL) accept_all(listener);
            else if (!readable(c)) drop(c);
        }
        if (first_held) release_held();
    }
    printf("messages %llu bytes %llu connections %llu\n", (unsigned long long)messages, (unsigned long long)bytes,
           (unsigned long long)connections);
    return 0;
}
