"""Scripts that read what a page displays, not its data."""

from __future__ import annotations

# Every node of the tree that is drawn, from one corner of its window to the other: only what is in sight is
# in the document.
TREE = """
async () => {
    const view = document.getElementById("tree"), found = {};
    const frame = () => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)));
    const value = text => text === undefined ? null : Number(text);
    for (let top = 0; top === 0 || top < view.scrollHeight; top += view.clientHeight / 2) {
        for (let left = 0; left === 0 || left < view.scrollWidth; left += view.clientWidth / 2) {
            view.scrollTo(left, top);
            await frame();
            for (const one of view.querySelectorAll("[data-node]")) found[one.dataset.node] = {
                token: value(one.dataset.token), state: one.dataset.state, score: value(one.dataset.score),
                processed: value(one.dataset.processed), met: value(one.dataset.met),
                standing: one.classList.contains("standing"), dropped: one.classList.contains("dropped"),
                text: one.querySelector(".token").textContent,
                step: one.querySelector(".step")?.textContent ?? null,
            };
        }
    }
    return found;
}
"""

# Texts that stand out too little against what is behind them: below 4.5 to 1, or 3 to 1 where they are large.
CONTRAST = """
() => {
    const pen = new OffscreenCanvas(1, 1).getContext("2d", {willReadFrequently: true});
    const read = colour => {
        pen.clearRect(0, 0, 1, 1);
        pen.fillStyle = colour;
        pen.fillRect(0, 0, 1, 1);
        const [red, green, blue, alpha] = pen.getImageData(0, 0, 1, 1).data;
        return {of: [red, green, blue], alpha: alpha / 255};
    };
    const over = ({of, alpha}, below) => of.map((one, at) => one * alpha + below[at] * (1 - alpha));
    const light = of => {
        const [red, green, blue] = of.map(one => one / 255)
            .map(one => one <= 0.04045 ? one / 12.92 : ((one + 0.055) / 1.055) ** 2.4);
        return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
    };
    const above = element => element.parentElement ? [...above(element.parentElement), element] : [element];
    // Of shapes, the ones drawn before a text and around its middle are behind it.
    const shapes = element => {
        const group = element.closest("g");
        const at = element.getBoundingClientRect();
        const [x, y] = [at.left + at.width / 2, at.top + at.height / 2];
        return [...group.querySelectorAll(":scope > rect")].filter(one => {
            const box = one.getBoundingClientRect();
            return box.left <= x && x <= box.right && box.top <= y && y <= box.bottom;
        });
    };
    const poor = [];
    let seen = 0;
    for (const element of document.body.querySelectorAll("*")) {
        const own = [...element.childNodes].some(one => one.nodeType === 3 && one.data.trim());
        if (!own || !element.checkVisibility({visibilityProperty: true})) continue;
        if (element.closest(".hidden, noscript, option")) continue;
        const drawn = element instanceof SVGElement;
        const style = getComputedStyle(element);
        let ground = [255, 255, 255];
        let alpha = 1;
        for (const one of above(element)) {
            ground = over(read(getComputedStyle(one).backgroundColor), ground);
            alpha *= Number(getComputedStyle(one).opacity);
        }
        if (drawn) for (const one of shapes(element)) ground = over(read(getComputedStyle(one).fill), ground);
        const colour = read(drawn ? style.fill : style.color);
        const seenAs = over({...colour, alpha: colour.alpha * alpha}, ground);
        const [low, high] = [light(seenAs), light(ground)].sort((one, other) => one - other);
        const ratio = (high + 0.05) / (low + 0.05);
        const size = parseFloat(style.fontSize);
        const large = size >= 24 || (size >= 18.66 && Number(style.fontWeight) >= 700);
        seen += 1;
        const name = `${element.localName}.${element.getAttribute("class")}`;
        const said = element.textContent.slice(0, 20);
        if (ratio < (large ? 3 : 4.5)) poor.push(`${name} ${said} ${ratio.toFixed(2)}`);
    }
    return {seen, poor: [...new Set(poor)]};
}
"""
