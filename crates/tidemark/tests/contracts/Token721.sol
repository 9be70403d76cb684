// SPDX-License-Identifier: Apache-2.0
pragma solidity ^0.8.28;

import {ERC721} from "@openzeppelin/contracts/token/ERC721/ERC721.sol";

/// Anybody may mint: it lives on a test's own node.
contract Token721 is ERC721 {
    constructor() ERC721("Harbour", "HRB") {}

    function mint(address to, uint256 id) external {
        _mint(to, id);
    }

    function burn(uint256 id) external {
        _update(address(0), id, _msgSender());
    }
}
