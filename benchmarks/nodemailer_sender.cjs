// nodemailer's pool with composed messages (text and HTML), as `smtp_senders.py` measures ours: one line of JSON.
// node nodemailer_sender.cjs PEERS_FOLDER PORT MESSAGES SIZE CONNECTIONS [MAX_PER_CONNECTION]
const path = require("path");
const [folder, port, messages, size, connections] = [process.argv[2], ...process.argv.slice(3).map(Number)];
const nodemailer = require(path.join(folder, "node_modules", "nodemailer"));
const transport = nodemailer.createTransport({
    host: "127.0.0.1", port, pool: true, maxConnections: connections, maxMessages: Infinity,
    secure: false, ignoreTLS: true, name: "c.test",
});
const line = "<p>It is a long paragraph of plain words in a <i>newsletter</i> that many people read.</p>\n";
const body = line.repeat(Math.max(1, Math.floor((size - 800) / line.length)));
function compose(n) {
    return {
        from: "News <news@sender.test>", to: `r${n}@rcpt.test`, subject: `No. ${n}`,
        messageId: `<${n}.x@sender.test>`, list: { unsubscribe: `https://sender.test/u/${n}` },
        text: `Dear Ann ${n},\n\nthis week in Town ${n % 977}: offer no. ${n}.\n`,
        html: `<html><body><p>Dear Ann ${n},</p><p>this week in Town ${n % 977}: <b>offer no. ${n}</b>.</p>\n${body}</body></html>\n`,
    };
}
async function some(first, count, atOnce) {
    let next = first;
    const end = first + count;
    await Promise.all(Array.from({ length: atOnce }, async () => {
        while (next < end) await transport.sendMail(compose(next++));
    }));
}
(async () => {
    const warm = connections;
    await some(0, warm, connections); // connects
    const usage = process.cpuUsage();
    const at = process.hrtime.bigint();
    await some(warm, messages, connections);
    const used = process.cpuUsage(usage);
    console.log(JSON.stringify({
        messages, wall_s: Number(process.hrtime.bigint() - at) / 1e9,
        user_s: used.user / 1e6, system_s: used.system / 1e6, warm,
    }));
    transport.close();
})();
